"""The local launcher: every rank of a run on this machine, detached from the submitter."""
