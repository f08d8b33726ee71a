"""The ssh launcher: one supervisor per host, started over SSH on all hosts or on none."""
