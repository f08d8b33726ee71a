"""From `submit` to the first training step on Slurm: a spec, and a batch script, against sbatch with that script.

    python benchmarks/slurm_overhead.py [PAIRS [NODES [RANKS_PER_NODE]]]    (root: it starts a rack)

Both start the same script: it imports torch, joins a gloo group, builds ResNet-18 in DistributedDataParallel, makes one
step, and rank 0 prints the time. The other way is what people write by hand: `#SBATCH` lines, MASTER_ADDR from
`scontrol show hostnames`, MASTER_PORT from the job's number, `srun python step.py`. The clock starts before the command
that submits. The three ways are run in turns, the order alternates; the figures are the medians of a round's ratios.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

STEP = """\
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from clusterddp.train.models.resnet import ResNet18
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=int(os.environ.get("RANK", os.environ["SLURM_PROCID"])),
                        world_size=int(os.environ.get("WORLD_SIZE", os.environ["SLURM_NTASKS"])))
torch.manual_seed(0)
model = DistributedDataParallel(ResNet18(num_classes=10))
loss = torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, dtype=torch.long))
loss.backward()
if dist.get_rank() == 0:
    print("first step at", time.time(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
BY_HAND = """\
#!/bin/bash
#SBATCH --job-name=byhand --nodes={nodes} --ntasks-per-node={ranks} --cpus-per-task=1 --output=byhand.out
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 PYTHONPATH={path}
srun --cpus-per-task=1 {python} -u step.py
"""
SPEC = """\
name: overhead
launcher: slurm
device: cpu
resources: {{nodes: {nodes}, procs_per_node: {ranks}, cpus_per_task: 1, time: "0:10:00"}}
entry: {{script: step.py}}
"""
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    pairs, nodes, ranks = [int(word) for word in sys.argv[1:] + ["5", "2", "8"][len(sys.argv) - 1 :]]
    with running_rack(RackPlan(nodes=[f"node{number + 1}" for number in range(nodes)])) as rack:
        place = rack.dir / "shared"
        (place / "step.py").write_text(STEP)
        (place / "job.yaml").write_text(SPEC.format(nodes=nodes, ranks=ranks))
        (place / "byhand.sh").write_text(
            BY_HAND.format(nodes=nodes, ranks=ranks, python=sys.executable, path=os.environ.get("PYTHONPATH", ROOT))
        )
        by_hand(rack, place)  # once for the page cache
        ratios: dict[str, list[float]] = {"a_spec": [], "the_script": []}
        for number in range(pairs):
            ways = (a_spec, the_script, by_hand)
            took = {way.__name__: way(rack, place) for way in (ways if number % 2 else ways[::-1])}
            for name, each in ratios.items():
                each.append(took[name] / took["by_hand"])
            text = "   ".join(f"{name} {seconds:6.2f} s" for name, seconds in sorted(took.items()))
            print(f"{text}   {ratios['a_spec'][-1]:.3f} {ratios['the_script'][-1]:.3f}", flush=True)
    for name, each in ratios.items():
        print(
            f"{name}: {nodes} x {ranks} ranks, {pairs} rounds: median ratio {statistics.median(each):.3f}, "
            f"{min(each):.3f} to {max(each):.3f}"
        )


def the_script(rack: Rack, place: Path) -> float:
    log = place / "byhand.out"
    log.unlink(missing_ok=True)
    began = time.time()
    command = [sys.executable, "-m", "clusterddp", "submit", "byhand.sh"]
    rack.run("head", command, cwd=place, env={"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))})
    return await_step(rack, log) - began


def a_spec(rack: Rack, place: Path) -> float:
    began = time.time()
    command = [sys.executable, "-m", "clusterddp", "submit", "job.yaml"]
    run = rack.run("head", command, cwd=place, env={"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}).stdout
    return await_step(rack, place / "runs" / run.strip() / "attempts/0/logs/rank-000.out") - began


def by_hand(rack: Rack, place: Path) -> float:
    log = place / "byhand.out"
    log.unlink(missing_ok=True)
    began = time.time()
    rack.run("head", ["sbatch", "byhand.sh"], cwd=place)
    return await_step(rack, log) - began


def await_step(rack: Rack, log: Path) -> float:
    """Wait for the first step and for the end of the job; return when the step was made, in seconds since the epoch."""
    deadline = time.time() + 300
    made = None
    while time.time() < deadline:
        text = log.read_text() if log.exists() else ""
        made = next((float(line.split()[-1]) for line in text.splitlines() if line.startswith("first step at")), made)
        if made and not rack.run("head", ["squeue", "-h"]).stdout.strip():
            return made
        time.sleep(0.1)
    text = log.read_text()[-2000:] if log.exists() else "nothing was written"
    raise SystemExit(f"no first step in {log}:\n{text}")


if __name__ == "__main__":
    main()
