"""Hang runs on purpose and see whether the culprit is named, and how soon; see that work is not taken for a hang.

    python benchmarks/hangs.py [KIND ...] [--launcher local|ssh|slurm] [--ranks N] [--rounds N] [--at-once N]

Each kind is a run of two nodes (ssh and slurm: hosts of a rack, as root), in which one rank, drawn by the kind's name
and the round, stops taking part in the 30th step: it sleeps, is stopped by a signal, spins in C with the GIL, enters
another loop than the others (one collective less), waits for a DataLoader, or holds two locks crosswise. In wrong_size
all ranks wait in their own init_process_group. drags is no hang: each step of the rank takes 0.1 s longer, and it has
to be named as a straggler.
evaluates (90 s), saves (a checkpoint of 2 minutes) and compiles (90 s before the first step) are no hangs, and nothing
may be reported. One line of JSON for each run, a summary at the end. tests/support/hang_kinds.py has the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.support.hang_kinds import AFTER_S, HANGS, NO_HANGS, SLOW_KIND, START_KIND, await_seen, submit_hang
from tests.support.person import Person
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.testbed.plan import RackPlan
from tests.testbed.rack import running_rack

HEADS = {
    "local": "resources: {nodes: 2, procs_per_node: %d, cpus_per_task: 1}\nsnapshot: false",
    "ssh": "resources: {procs_per_node: %d}\nssh: {hosts: [node1, node2], python: /opt/bare/bin/python}",
    "slurm": 'resources: {nodes: 2, procs_per_node: %d, cpus_per_task: 1, time: "0:10:00"}\nsnapshot: false',
}
_START_S, _NO_HANG_S = 90.0, 160.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=[*HANGS, START_KIND, SLOW_KIND, *NO_HANGS])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--launcher", choices=list(HEADS), default="local")
    options = parser.parse_args()
    head = f"launcher: {options.launcher}\n{HEADS[options.launcher] % (options.ranks // 2)}"
    with at_place(options.launcher) as new_person, ThreadPoolExecutor(options.at_once) as pool:
        turns = [(kind, number) for number in range(options.rounds) for kind in options.kinds]
        lines = list(pool.map(lambda turn: play(*turn, options.ranks, head, new_person), turns))
    late = [line["after_s"] for line in lines if line["after_s"] is not None]
    summary = {"right": sum(line["right"] for line in lines), "of": len(lines), "after_s_max": max(late, default=None)}
    print(json.dumps(summary))
    return 0 if summary["right"] == summary["of"] else 1


@contextmanager
def at_place(launcher: str) -> Iterator[Callable[[str], Person]]:
    """Start what a launcher needs; what it yields makes a directory of this name, and a person who works there."""
    with tempfile.TemporaryDirectory() as directory:
        if launcher == "local":
            yield lambda name: Person(path=made(Path(directory) / name))
            return
        nodes = ["node1", "node2"]
        if launcher == "ssh":
            with running_rack(RackPlan(nodes=nodes, private_hosts=True, slurm=False)) as rack:
                yield lambda name: SshPlace(rack=rack, path=made(rack.dir / "home/root" / name))
        else:
            with running_rack(RackPlan(nodes=nodes, gpus_per_host=0)) as rack:
                yield lambda name: SlurmPerson.at(rack, name)


def made(path: Path) -> Path:
    path.mkdir()
    return path


def play(kind: str, number: int, num_ranks: int, head: str, new_person: Callable[[str], Person]) -> dict[str, object]:
    """Run one kind, print and return what was seen."""
    person = new_person(f"{kind}-{number}")
    culprit = (zlib.crc32(kind.encode()) + number) % num_ranks
    run = submit_hang(person, kind, culprit, head=head)
    seen = await_seen(person, run, _NO_HANG_S if kind in NO_HANGS else AFTER_S + _START_S)
    person.clusterddp("cancel", run.name, check=False)
    expected = {START_KIND: ()}.get(kind, (culprit,))
    line = {
        "kind": kind,
        "right": seen is None if kind in NO_HANGS else seen is not None and seen.ranks == expected,
        "culprit": culprit,
        "named": None if seen is None else seen.ranks,
        "after_s": None if seen is None else round(seen.after_s, 1),
        "text": None if seen is None else seen.text,
    }
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
