"""How long torchrun's second node goes on after a rank of the first has failed, beside a run of the same two nodes.

Usage: python benchmarks/torchrun_wait.py

Both nodes are this machine. Rank 1 raises at its start; the script of rank 0 ends by itself 10 s later.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("rank 1")
time.sleep(10)
"""
_SPEC = (
    "name: wait\nlauncher: local\ndevice: cpu\nresources: {nodes: 2, procs_per_node: 1}\nentry: {script: train.py}\n"
)
_TORCHRUN = (
    "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id 1 --local-addr 127.0.0.1"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "train.py").write_text(_SCRIPT)
        (place / "job.yaml").write_text(_SPEC)
        run = [sys.executable, "-m", "clusterddp", "submit", "job.yaml", "--wait"]
        began = time.monotonic()
        code = subprocess.run(run, cwd=place, capture_output=True, check=False).returncode
        print(f"clusterddp: exit code {code} after {time.monotonic() - began:.1f} s")
        torchrun = [
            sys.executable,
            *_TORCHRUN.split(),
            "--local-addr",
            "127.0.0.1",
            "--rdzv-endpoint",
            "127.0.0.1:29871",
            "train.py",
        ]
        began = time.monotonic()
        left = {subprocess.Popen(torchrun, cwd=place, stderr=subprocess.DEVNULL) for _ in range(2)}
        while left:
            for node in [each for each in left if each.poll() is not None]:
                print(f"a node of torchrun: exit code {node.returncode} after {time.monotonic() - began:.1f} s")
                left.remove(node)
            time.sleep(0.1)


if __name__ == "__main__":
    main()
