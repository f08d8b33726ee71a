"""The slurm launcher: a run as one job, from the options of sbatch to the job that follows a time limit."""
