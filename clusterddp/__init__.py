"""clusterddp: submit PyTorch DistributedDataParallel runs to Slurm, to LAN machines, or to this machine."""

__version__ = "0.1.0"
