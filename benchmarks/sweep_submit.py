"""How long the submit of a sweep takes on a real Slurm: `clusterddp submit ... --sweep`, the start of Python included.

    python benchmarks/sweep_submit.py [--runs 1000] [--repeat 5]        (as root: it starts a rack, tests/testbed)

The runs are held in the queue, so that none starts. `processor` is the processor time of the submit; `sbatch` is a bare
`sbatch --array` of as many tasks, the part that is Slurm's own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

from tests.support.paths import ROOT
from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

SPEC = """
name: sweep_submit
launcher: slurm
resources: {nodes: 2, procs_per_node: 8}
slurm: {hold: true}
entry: {script: entry.py}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    bare: list[float] = []
    ours: list[float] = []
    busy: list[float] = []
    for _ in range(options.repeat):
        # Slurm remembers jobs for a while and takes MaxJobCount (10,000) in all: a fresh one each time.
        with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
            place = rack.dir / "shared" / "place"
            place.mkdir()
            (place / "job.yaml").write_text(SPEC)
            (place / "entry.py").write_text("print('hello')\n")
            bare.append(sbatch(rack, place, options.runs))
            before = processor_time()
            ours.append(submit(rack, place, options.runs))
            busy.append(processor_time() - before)
    print(f"{options.runs} runs, n={options.repeat}, median (lowest to highest) in seconds")
    for name, times in (("submit --sweep", ours), ("  processor", busy), ("sbatch --array", bare)):
        print(f"{name:<16}{statistics.median(times):6.2f}  ({min(times):.2f} to {max(times):.2f})")
    return 0


def submit(rack: Rack, place: Path, runs: int) -> float:
    """Submit a sweep and make sure that it is whole."""
    values = ",".join(map(str, range(runs)))
    argv = [sys.executable, "-m", "clusterddp", "submit", "job.yaml", f"env.SEED={values}", "--sweep", "-o", "json"]
    begun = time.perf_counter()
    done = rack.run("head", argv, cwd=place, env={"PYTHONPATH": str(ROOT)})
    taken = time.perf_counter() - begun
    submitted = json.loads(done.stdout)
    records = sorted((place / "runs" / submitted["sweep"]).glob("*/run.json"))
    assert len(submitted["runs"]) == len(records) == runs
    assert json.loads(records[0].read_text())["job_id"].startswith(submitted["job_id"] + "_")
    return taken


def processor_time() -> float:
    """Return the seconds that the processes started from here, and ended, have spent on a processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sbatch(rack: Rack, place: Path, runs: int) -> float:
    argv = ["sbatch", "--parsable", "--hold", f"--array=0-{runs - 1}", "--output=/dev/null", "--wrap", "true"]
    begun = time.perf_counter()
    rack.run("head", argv, cwd=place)
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
