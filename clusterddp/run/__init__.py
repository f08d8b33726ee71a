"""A run on disk: its directory, record, states, events, and the snapshot of the code."""
