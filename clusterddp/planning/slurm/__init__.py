"""What the plan of a run on Slurm has besides: the options of sbatch, the job, the container."""
