"""Start and stop a run: the plan, its carrying out, the launchers."""
