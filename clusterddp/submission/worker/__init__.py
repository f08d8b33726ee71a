"""The worker command: ranks that another launcher has started, or machines of ssh.hosts, become a run."""
