"""Checks before a start: this machine, its cluster, hosts over SSH, the nodes of a short job. Starts no user's run."""
