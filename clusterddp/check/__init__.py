"""Checks before a start: this machine, the cluster, the hosts, the nodes of a short job. Starts no run."""
