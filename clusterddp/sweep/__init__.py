"""Sweeps: runs that differ in some keys, as the tasks of one Slurm job array or in a queue of clusterddp."""
