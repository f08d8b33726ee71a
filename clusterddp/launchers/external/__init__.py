"""Runs whose ranks another launcher starts: torchrun, srun, mpirun, Kubeflow, a person."""
