"""Runs on this machine: submitit's local executor starts the task, which starts the supervisors."""
