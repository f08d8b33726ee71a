"""Where the commands of the launch table are typed, and what the ranks that they start have said."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

from tests.support.bare_python import VERSION
from tests.support.launch_cells import COMMON, FILES, Cell, Row, Where
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until
from tests.support.worker_ranks import MPI_AS_ROOT, Ended, demand, environment, wait_for
from tests.testbed.plan import BARE, HEAD, RackPlan
from tests.testbed.rack import SYSTEM_PATH, Rack, running_rack

ENTRIES = ROOT / "tests/entries"
VENV = Path(sys.executable).parent
NODES = ("node1", "node2")
WORK = Path("/root/work")
"""Where each of the machines has the scripts and the files."""
REQUIRED = ("torch", "click", "platformdirs", "pydantic", "pyyaml")
"""What the machines on which `worker` is typed have installed besides clusterddp."""
CONSOLE_SCRIPTS = {"clusterddp": "clusterddp.cli.main", "torchrun": "torch.distributed.run"}
RANK_LINE = re.compile(r"^rank (\d+) of (\d+)(?:, local rank (\d+) on node (\d+))?: sum (\d+)$", re.MULTILINE)


def fill(directory: Path, row: Row) -> Path:
    """Write what a user brings along, and the row's job.yaml."""
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    for script in ENTRIES.glob("*.py"):
        shutil.copy(script, directory)
    (directory / "job.yaml").write_text(spec_of(row))
    return directory


def spec_of(row: Row) -> str:
    """Put COMMON and what a row adds together; a section of the row's takes the place of COMMON's."""
    own = {line.partition(":")[0] for line in row.spec.splitlines()}
    head = [line for line in COMMON.splitlines() if line.partition(":")[0] not in own]
    return "\n".join([*head, row.spec, ""])


class Places:
    """The machines of a test session on which commands are typed; `directories` holds those of the last command."""

    def __init__(self, rack: Rack | None = None) -> None:
        self.rack = rack
        self.directories: list[Path] = []

    def type(self, row: Row, cell: Cell, directory: Path) -> list[Ended]:
        """Type a cell's commands; return how each of them has ended."""
        for tool in ("mpirun.openmpi", "mpirun.mpich"):
            if any(tool in command for command in cell.commands):
                demand(tool)
        self.directories = [fill(directory, row)]
        if self.rack is not None and self.rack.plan.private_hosts:
            self.directories += [fill(self._fresh(node), row) for node in NODES]
        argvs = {Where.MACHINES: self._on_machines, Where.HERE: self._here}.get(cell.where, self._on_head)
        return wait_for([start(argv, directory) for argv in argvs(cell.commands)])

    def said(self, ended: Sequence[Ended]) -> str:
        """Return all that ranks have written: to the terminals, and into the logs of the runs."""
        logs = [*self.found("attempts/*/logs/rank-*.out"), *self.found("attempts/*/steps/*/logs/rank-*.out")]
        return "\n".join([*(each.out for each in ended), *(log.read_text() for log in logs)])

    def found(self, name: str) -> list[Path]:
        """List the files of this name in the runs' directories."""
        return [file for each in self.directories for file in each.glob(f"runs/*/{name}")]

    def names_on_machines(self) -> list[list[str]]:
        """Return the names of the runs on each of the machines."""
        return [[run.name for run in each.glob("runs/[!.]*")] for each in self.directories[1:]]

    def _fresh(self, node: str) -> Path:
        assert self.rack is not None
        place = self.rack.outside(node, WORK)
        if place.exists():  # what is left of a row's processes may still write: not removed, but put aside
            place.rename(place.with_name(f"{place.name}-{time.monotonic_ns()}"))
        place.mkdir()
        return place

    def _here(self, commands: Sequence[str]) -> list[list[str]]:
        return [["sh", "-c", command] for command in commands]

    def _on_head(self, commands: Sequence[str]) -> list[list[str]]:
        assert self.rack is not None
        path = f"{VENV}:{BARE / 'bin'}:{SYSTEM_PATH}"
        variables = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **MPI_AS_ROOT}
        place = self.directories[0]
        return [self.rack.argv(HEAD, ["sh", "-c", command], cwd=place, env=variables) for command in commands]

    def _on_machines(self, commands: Sequence[str]) -> list[list[str]]:
        assert self.rack is not None
        each = commands if len(commands) > 1 else [*commands] * len(NODES)
        pairs = zip(NODES, each, strict=True)
        return [self.rack.argv(node, ["sh", "-c", command], cwd=WORK) for node, command in pairs]


def start(argv: Sequence[str], directory: Path) -> Popen[str]:
    variables = environment({"PATH": f"{VENV}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"})
    variables.pop("CLUSTERDDP_RUNS", None)
    return Popen(argv, cwd=directory, env=variables, stdout=PIPE, stderr=PIPE, text=True)


def expected(row: Row, cell: Cell) -> list[tuple[str, ...]]:
    """Return the lines that the ranks of a gang are to print, by rank."""
    size = cell.nodes * cell.ranks_per_node
    total = size * (size + 1) // 2 + size * cell.bonus
    lines = []
    for rank in range(size):
        node, local_rank = divmod(rank, cell.ranks_per_node)
        place = (str(local_rank), str(node)) if row.knows_place else ("", "")
        lines.append((str(rank), str(size), *place, str(total)))
    return lines


def check(row: Row, cell: Cell, places: Places, directory: Path) -> None:
    """Type a cell's commands and see that the ranks have become one gang."""
    ended = places.type(row, cell, directory)
    size = cell.nodes * cell.ranks_per_node
    assert [each.code for each in ended] == [0] * len(ended), ended
    if cell.where is Where.MACHINES:
        first, second = places.names_on_machines()
        assert len(first) == 1, first
        assert first == second
    if row.trains:
        await_result(places, "summary.json", size)
        return
    deadline = time.monotonic() + PATIENCE * 10
    # The first machine of `worker` shows what rank 0 prints, which is in its log, too.
    while len(lines := sorted(set(RANK_LINE.findall(places.said(ended))))) < size:
        assert time.monotonic() < deadline, (lines, ended)
        time.sleep(0.1)  # what ranks have written comes home a moment later
    assert lines == expected(row, cell), ended
    assert row.says in places.said(ended)
    assert places.found("attempts/*/rendezvous") == []  # the file by which they have met
    if row.result:
        await_result(places, f"output/{row.result}", size)


def await_result(places: Places, name: str, world_size: int) -> None:
    """Wait until one run has a file, as it comes home, which says how many ranks there were."""
    wait_until(lambda: places.found(name) != [], 60)
    (path,) = places.found(name)
    assert json.loads(path.read_text())["world_size"] == world_size


@contextmanager
def machines_without_slurm() -> Iterator[Places]:
    """A laptop and two hosts that share nothing; they have torch, clusterddp, and a way to the internet on paper."""
    plan = RackPlan(nodes=NODES, private_hosts=True, slurm=False, python_packages=REQUIRED)
    with running_rack(plan) as rack:
        install_clusterddp(rack.dir / "bare")
        route_everywhere(rack)
        yield Places(rack)


@contextmanager
def slurm_cluster() -> Iterator[Places]:
    """A login node and two nodes of a Slurm cluster, which share a file system."""
    with running_rack(RackPlan(nodes=NODES, gpus_per_host=0)) as rack:
        route_everywhere(rack)
        yield Places(rack)


def own_directory(places: Places) -> Path:
    """Make a directory on the head of a rack."""
    assert places.rack is not None
    directory = places.rack.dir / ("home/root" if places.rack.plan.private_hosts else "shared") / uuid.uuid4().hex[:8]
    directory.mkdir()
    return directory


def install_clusterddp(environment_dir: Path) -> None:
    """Do what pip would: put the package and the commands into the environment that the machines see."""
    package = environment_dir / "lib" / VERSION / "site-packages/clusterddp"
    shutil.copytree(ROOT / "clusterddp", package)
    compileall.compile_dir(package, quiet=1)  # the machines may not write there: each process would compile it
    for name, module in CONSOLE_SCRIPTS.items():
        command = environment_dir / "bin" / name
        command.write_text(f"#!{BARE}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        command.chmod(0o755)


def route_everywhere(rack: Rack) -> None:
    """Give the nodes the default route that machines have: scripts find their own address by it."""
    for node in NODES:
        rack.run(node, ["ip", "route", "add", "default", "via", rack.plan.address(HEAD)])
