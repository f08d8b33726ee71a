"""Shows what torch's own communication hooks do on gloo, which is why the trainer has its own.

    python benchmarks/stock_hooks.py

Two ranks train with each hook, in processes of their own, for one of them aborts; the last error is printed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version

RANK = """
import sys, torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
print("met", flush=True)
torch.manual_seed(0)
widths = [256, 128, 512, 64, 384, 96, 320, 32, 256]
model = torch.nn.Sequential(*map(torch.nn.Linear, widths, widths[1:]))
wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05)
if sys.argv[1] == "bf16":
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
if sys.argv[1] == "powersgd":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
if sys.argv[1] == "local":
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
for _ in range(50):
    wrapped(torch.randn(4, 256)).sum().backward()
print("done", flush=True)
"""


def run_two_ranks(way: str) -> tuple[bool, str]:
    """Train two ranks with one of torch's own ways; say whether both came to the end, and what they said."""
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, way],
            env=environ | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 90  # ranks whose messages do not fit each other may also wait for ever
    while None in [rank.poll() for rank in ranks] and not any(rank.poll() for rank in ranks):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    ended = [rank.poll() == 0 for rank in ranks]
    for rank in ranks:
        rank.kill()
    said = "\n".join(rank.communicate()[0] for rank in ranks)
    assert "met" in said.splitlines()
    return all(ended), said


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    print(f"torch {version('torch')}, gloo, 2 ranks")
    for way in ("bf16", "powersgd", "local"):
        works, said = run_two_ranks(way)
        last = next((line for line in reversed(said.splitlines()) if "Error" in line or "error" in line), "")
        print(f"{way:10} {'works' if works else f'fails: {last.strip()[:160]}'}")


if __name__ == "__main__":
    main()
