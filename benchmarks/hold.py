"""From `submit` to the first step: a run in a hold against the same run in a job of its own, in turns.

    python benchmarks/hold.py [PAIRS [NODES [RANKS_PER_NODE]]]    (root: it starts a rack)

The queue of the test cluster is empty, so a job of its own starts at once here. The clock starts before the command.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from slurm_overhead import ROOT, SPEC, STEP

from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack


def main() -> None:
    pairs, nodes, ranks = [int(word) for word in sys.argv[1:] + ["5", "2", "8"][len(sys.argv) - 1 :]]
    with running_rack(RackPlan(nodes=[f"node{number + 1}" for number in range(2 * nodes)])) as rack:
        place = rack.dir / "shared"
        (place / "step.py").write_text(STEP)
        (place / "job.yaml").write_text(SPEC.format(nodes=nodes, ranks=ranks))
        hold = clusterddp(rack, place, "hold", "job.yaml", "--for", "2h")
        own_job(rack, place, hold)  # once for the page cache
        in_hold(rack, place, hold)
        took: list[tuple[float, float]] = []
        for number in range(pairs):
            ways = (in_hold, own_job) if number % 2 else (own_job, in_hold)
            seconds = {way: way(rack, place, hold) for way in ways}
            took.append((seconds[in_hold], seconds[own_job]))
            print(f"in the hold {took[-1][0]:6.2f} s   a job of its own {took[-1][1]:6.2f} s", flush=True)
        clusterddp(rack, place, "cancel", hold)
    ratios = [held / own for held, own in took]
    print(
        f"{nodes} x {ranks} ranks, {pairs} pairs: median ratio {statistics.median(ratios):.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f}; medians {statistics.median(held for held, _ in took):.2f} s and "
        f"{statistics.median(own for _, own in took):.2f} s"
    )


def in_hold(rack: Rack, place: Path, hold: str) -> float:
    return first_step(rack, place, "--in", hold)


def own_job(rack: Rack, place: Path, hold: str) -> float:
    return first_step(rack, place)


def first_step(rack: Rack, place: Path, *arguments: str) -> float:
    """Submit and wait for the end of the run; return the seconds to its first step."""
    began = time.time()
    run = clusterddp(rack, place, "submit", "job.yaml", *arguments)
    log = place / "runs" / run / "attempts/0/logs/rank-000.out"
    clusterddp(rack, place, "wait", run)
    time.sleep(2.0)  # its last processes
    line = next(line for line in log.read_text().splitlines() if line.startswith("first step at"))
    return float(line.split()[-1]) - began


def clusterddp(rack: Rack, place: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "clusterddp", *arguments]
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    return rack.run("head", command, cwd=place, env=env, timeout_s=300).stdout.strip()


if __name__ == "__main__":
    main()
