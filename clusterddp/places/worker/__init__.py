"""Runs whose ranks or nodes somebody else started: torchrun, srun, mpirun, a person on each machine."""
