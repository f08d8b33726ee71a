"""A rack on one machine: real Slurm, sshd and network cables between hosts that are namespaces. See README.md."""
