"""Sessions with the agents of SSH hosts: start one, ask it, upload files to it."""
