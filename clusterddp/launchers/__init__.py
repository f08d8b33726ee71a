"""Launchers: each starts the processes of a run, stops them, and reports their state."""
