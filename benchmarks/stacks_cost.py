"""What it costs a step that a rank can be asked where it is and how fast: pairs of runs with and without, of two ranks.

    python benchmarks/stacks_cost.py [PAIRS [STEPS]]

Each run trains a small network with DDP and gloo. With: the Flight Recorder has 200 collectives, the thread that
answers is there, and is asked every 2.5 s for the stacks, as of a silent run, and for the pace, which otherwise a
supervisor does every 10 to 60 s. Without: none of it.
Prints the median ratio of a step's time and of its processor time, the latter for machines that do other things, too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from tests.support.paths import ROOT

RANK = """
import json, os, resource, statistics, sys, time
if sys.argv[1] == "with":
    from clusterddp.node.stack_hook import answer_stack_requests
    answer_stack_requests()
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.Flatten()]
net = torch.nn.Sequential(*layers, torch.nn.LazyLinear(10))
images, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
net(images)
model = torch.nn.parallel.DistributedDataParallel(net)
times = []
for step in range(int(sys.argv[2]) + 20):
    if step == 20:
        used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    times.append(time.perf_counter() - began)
now = resource.getrusage(resource.RUSAGE_SELF)
spent = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
print(json.dumps({"step_s": statistics.median(times[20:]), "cpu_s": spent / (len(times) - 20)}))
"""


def main() -> int:
    num_pairs, num_steps = [int(word) for word in (sys.argv[1:] + ["10", "300"][len(sys.argv) - 1 :])]
    ratios: dict[str, list[float]] = {"step_s": [], "cpu_s": []}
    for pair in range(num_pairs):
        order = ("with", "without") if pair % 2 else ("without", "with")
        found = {how: run(how, num_steps, 20000 + pair) for how in order}
        for name, values in ratios.items():
            values.append(found["with"][name] / found["without"][name])
        print(json.dumps(found), flush=True)
    summary = {name: round(statistics.median(values), 4) for name, values in ratios.items()}
    print(json.dumps({"pairs": num_pairs, "steps": num_steps} | summary))
    return 0


def run(how: str, num_steps: int, port: int) -> dict[str, float]:
    """Run two ranks; return rank 0's figures."""
    from clusterddp.node.rank_probe import AskedRank, find_memory
    from clusterddp.node.stack_hook import PACE, STACKS

    recorder = "200" if how == "with" else "0"
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(RANK)
        script.flush()
        argv = [sys.executable, script.name, how, str(num_steps)]
        ranks = [
            subprocess.Popen(
                argv,
                env=common | {"RANK": str(rank), "TORCH_FR_BUFFER_SIZE": recorder, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        while ranks[0].poll() is None:
            for rank in ranks if how == "with" else ():
                if found := find_memory(rank.pid):
                    for question in (STACKS, PACE):
                        AskedRank(found[1], question).close()
            try:
                ranks[0].wait(2.5)
            except subprocess.TimeoutExpired:
                continue
        out, _ = [rank.communicate()[0] for rank in ranks]
    return dict(json.loads(out))


if __name__ == "__main__":
    sys.exit(main())
