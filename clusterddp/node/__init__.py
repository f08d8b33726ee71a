"""On the machines: the supervisor of a node, the start-up of a rank, the guard; no torch here."""
