"""The facts of a machine on which nothing is wrong."""

from __future__ import annotations

from clusterddp.facts.machine import Directory, Machine
from clusterddp.facts.torch import Torch
from clusterddp.network.interface import Link, LinkAddress

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
    links=(
        Link(name="lo", loopback=True, addresses=(LinkAddress(address="127.0.0.1", prefix=8),)),
        Link(name="eth0", addresses=(LinkAddress(address="10.0.0.1", prefix=24),)),
        Link(name="docker0", addresses=(LinkAddress(address="172.17.0.1", prefix=16),)),
    ),
    directory=Directory(path="/shared/runs", file_system="nfs4", mount_point="/shared", free_bytes=2**40),
    torch=Torch(version="2.10.0", torchvision="0.25.0"),
)
