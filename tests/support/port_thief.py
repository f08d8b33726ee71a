"""A process of another user that tries to listen on a port of ours, as anybody on the machine may."""

from __future__ import annotations

import subprocess

THIEF = """\
import socket, sys
port, stolen = int(sys.argv[1]), []
ways = {"SO_REUSEADDR": [socket.SO_REUSEADDR], "SO_REUSEPORT": [socket.SO_REUSEPORT]}
ways["both"] = ways["SO_REUSEADDR"] + ways["SO_REUSEPORT"]
for name, options in ways.items():
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        with socket.socket(family) as sock:
            for option in options:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address, port))
                sock.listen()
            except OSError:
                continue
            stolen.append(f"{name} at {address or 'any'}")
print(*stolen, sep=", ")
"""
COMMAND = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", THIEF]

STEAL = f"""
import subprocess, time
def let_steal(rank, port, report):
    # Have rank 1 try to steal the port before rank 0 serves there.
    if rank == 1:
        done = subprocess.run([*{COMMAND!r}, str(port)], stdout=subprocess.PIPE, text=True, check=True)
        report.with_suffix(".part").write_text(done.stdout.strip())
        report.with_suffix(".part").rename(report)
    while not report.exists():
        time.sleep(0.01)
"""
"""Text of a program's, for ranks that run as root."""
MEET = """
import os, pathlib, time
import torch
import torch.distributed as dist
report = pathlib.Path(os.environ["CLUSTERDDP_RUN_DIR"], "stolen")
let_steal(int(os.environ["RANK"]), os.environ["MASTER_PORT"], report)
def meet(**options):
    dist.init_process_group("gloo", **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    dist.destroy_process_group()
    pathlib.Path(f"left-{len(options)}-{os.environ['RANK']}").touch()
    while len(list(pathlib.Path().glob(f"left-{len(options)}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
meet()
"""
"""Text that follows: the ranks make a group at the port when the theft was tried."""


def steal(port: int) -> str:
    """Return in words how the port could be listened on; empty: in no way."""
    done = subprocess.run([*COMMAND, str(port)], stdout=subprocess.PIPE, text=True, check=True, cwd="/")
    return done.stdout.strip()
