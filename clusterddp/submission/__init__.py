"""Execute a plan: start it, wait for it, cancel it, resume it; sweeps, as a Slurm job array or in a queue."""
