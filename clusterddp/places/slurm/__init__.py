"""Runs on Slurm, on the login node and on the nodes: its commands, the launcher, the batch script, the tasks."""
