"""What Slurm's own commands say, as values: the queue, the accounting, the cluster. Nothing here submits."""
