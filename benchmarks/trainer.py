"""The trainer against its peers, over its ranks and over slow links; every figure of docs/benchmarks.md.

    python benchmarks/trainer.py all                 every part below, then the table: about half an hour, best on a quiet machine
    python benchmarks/trainer.py cpu                 images/s of ResNet-18 against the loops of kuangliu/pytorch-cifar, ModelArts, Lightning, Accelerate
    python benchmarks/trainer.py ranks               1, 2 and 4 ranks on this machine against one process with as many threads as there are cores
    python benchmarks/trainer.py link                two hosts of a rack, 1 Gbit/s and 100 Mbit/s between them (root; Linux)
    python benchmarks/trainer.py loss                the loss that each exchange reaches after equal samples
    python benchmarks/trainer.py gpu                 what there is to show on a GPU; without one it says what it would run
    python benchmarks/trainer.py curve RUN_DIR       take the accuracy, epoch by epoch, of a run that was made by hand
    python benchmarks/trainer.py table               write what was measured into docs/benchmarks.md

Contenders take turns, each turn a fresh process (of the trainer: a submitted run), the order of a round turned around
in the next one; a ratio is formed within a round, and the table has its median, least and most. Peers are installed at
the first use into --peers, a directory outside of the repository; results are kept beside them, one JSON file per part.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
from trainer_gpu import measure_gpu
from trainer_peers_setup import Peers
from trainer_rounds import Contender, Turn, play, say, write_result
from trainer_runs import LocalPlace, rack_turn, read_curve
from trainer_table import write_tables

from tests.support.ssh_place import ssh_place_on
from tests.testbed.plan import RackPlan
from tests.testbed.rack import find_obstacle, running_rack

MODES = ("exact", "bf16", "local:4", "local:8")
NOISE: dict[str, Any] = {
    "model": "resnet18",
    "dataset": "random",
    "epochs": 1000,
    "eval_every": 1000,
    "checkpoint_every": 1000,
    "checkpoint_minutes": 0,
}
"""Speed is measured on noise: its images cost what images cost."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs and racks are taken down
    arguments = parse()
    parts = {"cpu": cpu, "ranks": ranks, "link": link, "loss": loss, "gpu": measure_gpu, "curve": curve}
    wanted = ["cpu", "ranks", "link", "loss", "gpu"] if arguments.part == "all" else [arguments.part]
    for part in wanted:
        if part != "table":
            began = time.monotonic()
            parts[part](arguments)
            say(f"{part}: {(time.monotonic() - began) / 60:.1f} min")
    if arguments.part in ("all", "table"):
        write_tables(arguments.results, arguments.docs)


def cpu(arguments: argparse.Namespace) -> None:
    """Measure one process with all cores, and two processes, each with half of them."""
    peers = Peers.set_up(arguments.peers, kuangliu=arguments.kuangliu)
    cores = len(os.sched_getaffinity(0))
    slow, fast = ((1, 1), (1, 1)) if arguments.quick else ((1, 2), (2, 6))  # steps to warm up, and timed
    one = partial(peers.turn, ranks=1, threads=cores)
    two = partial(peers.turn, ranks=2, threads=max(1, cores // 2), batch=64, best=True)
    with local_place() as place:
        ours = partial(ours_on_noise, place, warm=fast[0], steps=fast[1])
        contenders = [
            Contender(name="ours", label="clusterddp, as it comes", take_turn=partial(ours, threads=cores)),
            Contender(
                name="ours-fp32",
                label="clusterddp, precision: fp32",
                take_turn=partial(ours_on_noise, place, warm=slow[0], steps=slow[1], threads=cores, precision="fp32"),
            ),
            Contender(
                name="ours-native",
                label="clusterddp, kernels: native",
                take_turn=partial(ours, threads=cores, kernels="native"),
            ),
            Contender(
                name="ours-2",
                label="clusterddp, 2 ranks",
                take_turn=partial(ours, ranks=2, threads=max(1, cores // 2), batch_size=64),
            ),
            *(
                Contender(name=name, label=label, take_turn=partial(one, name, steps=slow))
                for name, label in peers.DEFAULTS.items()
            ),
            *(
                Contender(name=f"{name}-best", label=label, take_turn=partial(one, name, steps=fast, best=True))
                for name, label in peers.BEST.items()
            ),
            *(
                Contender(
                    name=f"{name}-best-2", label=f"{label}; 2 processes", take_turn=partial(two, name, steps=fast)
                )
                for name, label in peers.BEST.items()
            ),
        ]
        played = play(contenders, arguments.rounds or 4)
    write_result(arguments.results, "cpu", played, batch=128, cores=cores, peers=peers.versions())


def ranks(arguments: argparse.Namespace) -> None:
    """Measure how the trainer scales over the ranks of this machine, at one and the same global batch."""
    cores = len(os.sched_getaffinity(0))
    warm, steps = (1, 1) if arguments.quick else (2, 6)
    cases = {
        "threads": (f"1 rank, {cores} threads", {"ranks": 1, "threads": cores}),
        "1": ("1 rank, 1 thread", {"ranks": 1, "threads": 1}),
        "2": ("2 ranks, 1 thread each", {"ranks": 2, "threads": 1}),
        "2-sockets": ("2 ranks, 1 thread each, as two machines", {"ranks": 1, "nodes": 2, "threads": 1}),
        "2-nothing": (
            "2 ranks, 1 thread each, that exchange next to nothing",
            {"ranks": 2, "threads": 1, "comm": "local:1000"},
        ),
        "4": ("4 ranks, 1 thread each", {"ranks": 4, "threads": 1}),
        "4-bf16": ("4 ranks, 1 thread each, comm: bf16", {"ranks": 4, "threads": 1, "comm": "bf16"}),
    }
    with local_place() as place:
        contenders = [
            Contender(
                name=name,
                label=label,
                take_turn=partial(
                    ours_on_noise,
                    place,
                    warm=warm,
                    steps=steps,
                    batch_size=128 // (int(case["ranks"]) * int(case.get("nodes", 1))),
                    **case,
                ),
            )
            for name, (label, case) in cases.items()
        ]
        played = play(contenders, arguments.rounds or 3)
    write_result(arguments.results, "ranks", played, batch=128, cores=cores)


def link(arguments: argparse.Namespace) -> None:
    """Measure two machines of one core against one of them, over a link that is slower than their work."""
    obstacle = find_obstacle()
    if obstacle:
        say(f"link: SKIPPED: {obstacle}")
        return
    plan = RackPlan(nodes=["node1", "node2"], private_hosts=True, slurm=False)
    with running_rack(plan) as rack, ssh_place_on(rack) as place:
        for mbit_per_s in arguments.mbit:
            # The last eight steps have the end of the epoch, which else comes once in thousands of steps.
            warm, steps = (8, 8) if arguments.quick or mbit_per_s < 1000 else (8, 32)
            for node in plan.nodes:
                rack.set_link_rate(node, mbit_per_s)
            turn = partial(rack_turn, place, warm_steps=warm, **NOISE, batch_size=8, samples=1000, log_every=8)
            turn = partial(turn, max_steps=warm + steps + 8, last_steps=8, precision=arguments.precision)
            contenders = [
                Contender(name="one", label="one machine", take_turn=partial(turn, hosts=1)),
                *(
                    Contender(
                        name=mode, label=f"two machines, comm: {mode}", take_turn=partial(turn, hosts=2, comm=mode)
                    )
                    for mode in MODES
                ),
                Contender(
                    name="nothing",
                    label="two machines that send next to nothing",
                    take_turn=partial(turn, hosts=2, comm="local:1000"),
                ),
            ]
            played = play(contenders, arguments.rounds or (4 if mbit_per_s >= 1000 else 1))
            write_result(arguments.results, f"link-{mbit_per_s}", played, mbit_per_s=mbit_per_s, batch_per_rank=8)


def loss(arguments: argparse.Namespace) -> None:
    """Train with every exchange on the same samples in the same order, to the end of a schedule; a round is a seed.

    What is exchanged does not depend on the link, so this runs on loopback.
    """
    data = (
        {"dataset": "cifar10", "data_dir": str(arguments.data_dir), "download": False}
        if arguments.data_dir
        else {"dataset": "shapes"}
    )
    samples = 160 if arguments.quick else arguments.loss_samples
    seeds = {mode: iter(range(1000)) for mode in MODES}

    def turn(mode: str, place: LocalPlace) -> Turn:
        seed = next(seeds[mode])
        settings = {"model": "resnet18", "samples": samples, "epochs": 1, "batch_size": 8, "comm": mode, "seed": seed}
        return place.turn(ranks=2, threads=1, log_every=8, precision=arguments.precision, **data, **settings)

    with local_place() as place:
        contenders = [
            Contender(name=mode, label=f"comm: {mode}", take_turn=partial(turn, mode, place)) for mode in MODES
        ]
        played = play(contenders, arguments.rounds or 1)
    write_result(arguments.results, "loss", played, samples=samples, batch_per_rank=8, ranks=2, dataset=data["dataset"])


def curve(arguments: argparse.Namespace) -> None:
    """Keep the accuracy of a run, epoch by epoch, under the name of its spec."""
    assert arguments.run is not None, "curve needs the directory of a run"
    name, played = read_curve(arguments.run)
    write_result(arguments.results, f"curve-{name}", played)


def ours_on_noise(
    place: LocalPlace, *, warm: int, steps: int, ranks: int = 1, threads: int, batch_size: int = 128, **more: Any
) -> Turn:
    settings = {**NOISE, "samples": 1280, "log_every": warm, "batch_size": batch_size, **more}
    stop_after = 2 * warm + steps
    return place.turn(ranks=ranks, threads=threads, warm_steps=warm, last_steps=warm, stop_after=stop_after, **settings)


@contextlib.contextmanager
def local_place() -> Iterator[LocalPlace]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        yield LocalPlace(path=Path(directory))


def parse() -> argparse.Namespace:
    cache = platformdirs.user_cache_path("clusterddp") / "benchmarks"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["all", "cpu", "ranks", "link", "loss", "gpu", "curve", "table"])
    parser.add_argument("run", type=Path, nargs="?", help="curve: the directory of a run")
    parser.add_argument(
        "--rounds", type=int, help="turns of each contender; default: what fits into half an hour in all"
    )
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it works, not to measure")
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100], help="link: its rates, Mbit/s")
    parser.add_argument("--precision", default="auto", help="of link and loss")
    parser.add_argument("--loss-samples", type=int, default=4000, help="training images of the part loss")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10 for the parts loss (else: shapes) and gpu")
    parser.add_argument("--peers", type=Path, default=cache / "peers", help="where the peers are or will be")
    parser.add_argument("--kuangliu", default=Peers.KUANGLIU, help="what git shall clone; a path works, too")
    parser.add_argument("--airbench", default=Peers.AIRBENCH, help="what git shall clone; a path works, too")
    parser.add_argument("--results", type=Path, default=cache / "results")
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr or ''}")
