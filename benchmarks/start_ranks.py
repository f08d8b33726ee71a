"""Start sixteen ranks that meet and then idle, forked from one import of torch and each by itself, in turns.

    python benchmarks/start_ranks.py [PAIRS]

Prints, for each start, the seconds from `clusterddp submit` until all ranks have left `init_process_group`, and the sum
of the ranks' PSS then; at the end the medians and the median ratio of the pairs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 16
SPEC = """
name: start_ranks
device: cpu
resources: {{nodes: 2, procs_per_node: 8}}
snapshot: false
entry: {{script: ranks.py, fork: {fork}}}
"""
SCRIPT = """
import os
import time
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
Path(f"met-{dist.get_rank()}").write_text(str(os.getpid()))
time.sleep(120)
"""


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[tuple[float, float]]] = {"forked": [], "alone": []}
    for number in range(pairs):
        for kind in sorted(found, reverse=bool(number % 2)):
            seconds, pss_gb = start("true" if kind == "forked" else "false")
            found[kind].append((seconds, pss_gb))
            print(f"{number} {kind:6} {seconds:6.2f} s  {pss_gb:5.2f} GB", flush=True)
    for kind, starts in found.items():
        seconds, pss = zip(*starts, strict=True)
        print(
            f"{kind:6} median {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
            f"PSS {statistics.median(pss):.2f} GB, at most {max(pss):.2f}"
        )
    ratios = [forked[0] / alone[0] for forked, alone in zip(found["forked"], found["alone"], strict=True)]
    print(f"forked / alone: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def start(fork: str) -> tuple[float, float]:
    """Start the ranks; return the seconds until all have met, and their PSS in GB."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "job.yaml").write_text(SPEC.format(fork=fork))
        (directory / "ranks.py").write_text(SCRIPT)
        begun = time.monotonic()
        subprocess.run([*CLUSTERDDP, "submit", "job.yaml"], cwd=directory, check=True, capture_output=True)
        while len(met := list(directory.glob("met-*"))) < RANKS or not all(path.read_text() for path in met):
            if time.monotonic() > begun + 120:
                raise SystemExit(subprocess.run([*CLUSTERDDP, "status"], cwd=directory, check=False).returncode)
            time.sleep(0.02)
        seconds = time.monotonic() - begun
        pss_kb = sum(read_pss_kb(int(path.read_text())) for path in met)
        subprocess.run([*CLUSTERDDP, "cancel", "@last"], cwd=directory, check=True, capture_output=True)
        return seconds, pss_kb * 1024 / 1e9


def read_pss_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


CLUSTERDDP = [sys.executable, "-m", "clusterddp"]

if __name__ == "__main__":
    main()
