"""The Slurm part of a plan: the options of sbatch, the job, its dependencies, the container."""
