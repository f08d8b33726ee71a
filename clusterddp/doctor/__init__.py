"""Asks before anything is started: this machine, the cluster, and the nodes of a short job. Starts no run."""
