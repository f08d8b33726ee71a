"""Runs Slurm's commands and returns their answers as values: queue, accounting, cluster. Submits nothing."""
