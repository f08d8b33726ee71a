"""The places where runs can run: each starts the processes of a run, stops them, and reports their state."""
