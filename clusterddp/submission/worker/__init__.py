"""The worker command: ranks that another launcher has started become a run."""
