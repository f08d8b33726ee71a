"""The facts of a machine on which nothing is wrong."""

from __future__ import annotations

from clusterddp.facts.machine import Directory, Interface, Machine
from clusterddp.facts.torch import Torch

HERE = Machine(
    host="login",
    time=1000.0,
    python="3.11.7",
    executable="/env/bin/python",
    cores=8,
    memory_bytes=2**36,
    shm_bytes=2**34,
    open_files=65_536,
    gpus=(),
    own_addresses=("10.0.0.1",),
    interfaces=(
        Interface(name="lo", addresses=("127.0.0.1",), usable=False),
        Interface(name="eth0", addresses=("10.0.0.1",), usable=True),
        Interface(name="docker0", addresses=("172.17.0.1",), usable=False),
    ),
    directory=Directory(path="/shared/runs", file_system="nfs4", mount_point="/shared", free_bytes=2**40),
    torch=Torch(version="2.10.0", torchvision="0.25.0"),
)
