"""The SSH part of a plan: the hosts and their Pythons, the uploads, the downloads."""
