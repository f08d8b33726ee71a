"""Read a run: status, logs."""
