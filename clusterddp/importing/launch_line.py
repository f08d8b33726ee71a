"""The size in the line that starts the ranks: its nodes, the ranks on each, the hosts that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.importing.command import Command, Level
from clusterddp.importing.files import Host, list_hosts
from clusterddp.importing.findings import Findings
from clusterddp.importing.job import GPU_SIZES, SIZES, Given, GivenOptions
from clusterddp.importing.options import Option
from clusterddp.importing.values import Text, as_written, fixed_number, is_fixed
from clusterddp.spec.hostfile import parse_hosts, read_hostfile
from clusterddp.spec.hosts import expand_all
from clusterddp.spec.section import MAX_RANKS
from clusterddp.spec.slurm_options import KNOWN, OWNED, SRUN_OPTIONS

_RIVALS = (
    frozenset({"ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu"}),
    frozenset({"cpus_per_task", "cpus_per_gpu"}),
    GPU_SIZES,
)
"""Groups of options that exclude each other: where the job has one of a group, srun's are ignored."""
_OF_THE_JOB = (KNOWN - OWNED.keys() - SRUN_OPTIONS) | SIZES | {"time"}
"""Options by which srun requests a job when it runs outside of one."""
_NODES = {"srun": "nodes", "torchrun": "nnodes", "launch": "nnodes", "accelerate": "num_machines",
          "deepspeed": "num_nodes"}  # fmt: skip
_PER_NODE = ("npernode", "ppn", "ntasks_per_node")
_TOTALS = ("np", "num_proc")
_HOST_LISTS = ("host", "hosts", "include")
_HOSTFILES = ("hostfile", "machinefile", "f")


@dataclass(slots=True)
class LaunchLine:
    """The size by the options of the launch programs, and by the job's options where they have none."""

    given: GivenOptions
    """The job's options, with those that the line adds or replaces."""
    settled: set[str] = field(default_factory=set)
    """Names of options that `given`, `hosts` or the number of ranks contains."""
    hosts: tuple[Host, ...] = ()
    """The hosts that the ranks are started on, where the line names them, with the ranks of each."""

    def hosts_to_write(self, ranks_per_node: int) -> tuple[Host, ...]:
        """Return the hosts, with the number of ranks of each where the numbers differ."""
        alike = len({slots for _, slots in self.hosts}) == 1
        return tuple((host, None if alike else slots or ranks_per_node) for host, slots in self.hosts)


def read_launch_line(command: Command, job: GivenOptions, findings: Findings, line: int, place: Path) -> LaunchLine:
    """Read the nodes, tasks and hosts of a command line; options of the job that contradict it are listed.

    `place`: the directory of hostfiles.
    """
    reader = _Reader(job, findings, line, place)
    for level in command.levels:
        reader.read(level)
    reader.list_unknown_nodes(command.levels)
    if reader.found.hosts and job:
        why = "in a job Slurm chooses the hosts; slurm.nodelist names them"
        findings.lose(", ".join(host for host, _ in reader.found.hosts), why, line)
    return reader.found


def ranks_of_mapping(value: Text) -> int | None:
    """Return N of `--map-by ppr:N:node`."""
    match = re.fullmatch("ppr:([1-9][0-9]{0,4}):node", value.text.lower()) if is_fixed(value) else None
    return int(match[1]) if match else None


class _Reader:
    """Reads the launch programs of one line, from the outermost inwards; the innermost decides."""

    def __init__(self, job: GivenOptions, findings: Findings, line: int, place: Path) -> None:
        self.found = LaunchLine(given=GivenOptions(job))
        self._job = job
        self._findings = findings
        self._line = line
        self._place = place

    def read(self, level: Level) -> None:
        """Read the options of one program whose values are known here."""
        fixed = {option.name: option for option in level.options if option.value is None or is_fixed(option.value)}
        if level.program == "srun":
            self._read_srun(fixed)
        elif level.program in {"mpirun", "horovodrun"}:
            self._read_mpirun(level, fixed)
        else:
            self._read_agent(level, fixed)

    def list_unknown_nodes(self, levels: Iterable[Level]) -> None:
        """List a number of nodes that only the shell of the job knows, where the job's options have none."""
        for level in levels:
            for option in level.options:
                if option.name == _NODES.get(level.program) and "nodes" not in self.found.given:
                    text = f"{level.program} {as_written(option.text)}"
                    self._findings.lose(text, "the script does not have the number of nodes", self._line)

    def _read_srun(self, fixed: Mapping[str, Option]) -> None:
        for name, option in fixed.items():
            rivals = next((group for group in _RIVALS if name in group), frozenset({name}))
            if name == "nodes":
                self._set_nodes("srun", option, option.value.text if option.value else "")
            elif (name in SIZES and not rivals & self._job.keys()) or (not self._job and name in _OF_THE_JOB):
                self.found.given[name] = Given(option=option, line=self._line, of="srun")
                self.found.settled.add(name)

    def _read_mpirun(self, level: Level, fixed: Mapping[str, Option]) -> None:
        found = self.found
        total = next((number for name in _TOTALS if (number := _number(fixed.get(name)))), None)
        per_node = next((number for name in _PER_NODE if (number := _number(fixed.get(name)))), None)
        mapped = fixed["map_by"].value if "map_by" in fixed else None
        if per_node is None and mapped and (per_node := ranks_of_mapping(mapped)):
            found.settled.add("map_by")
        found.settled |= fixed.keys() & {*_TOTALS, *_PER_NODE}
        by_node = "bynode" in fixed or bool(mapped and mapped.text.lower().startswith("node"))
        if named := self._find_hosts(level, fixed):
            option, hosts = named
            found.hosts = _place_ranks(hosts, total, per_node, by_node=by_node)
            found.settled |= fixed.keys() & {"map_by", "bynode"} if by_node else set()
            self._set_nodes(level.program, option, str(len(found.hosts)))
        elif total and per_node and "nodes" not in found.given:
            option = next(fixed[name] for name in _TOTALS if name in fixed)
            self._set_nodes(level.program, option, str(-(-total // per_node)))

    def _read_agent(self, level: Level, fixed: Mapping[str, Option]) -> None:
        """Read torchrun's, accelerate's and DeepSpeed's options."""
        found, option = self.found, fixed.get(_NODES[level.program])
        named = self._find_hosts(level, fixed) if level.program == "deepspeed" else None
        if named:
            found.hosts = tuple(named[1][: _number(option) or len(named[1])])
            self._set_nodes(level.program, named[0], str(len(found.hosts)))
            found.settled.add("num_nodes")
        elif option and option.value:
            self._set_nodes(level.program, option, option.value.text)
        threads = fixed.get("num_cpu_threads_per_process")
        if threads and _number(threads) and not {"cpus_per_task", "cpus_per_gpu"} & found.given.keys():
            cores = Option(name="cpus_per_task", value=threads.value, text=threads.text)
            found.given["cpus_per_task"] = Given(option=cores, line=self._line, of=level.program)
            found.settled.add(threads.name)

    def _set_nodes(self, program: str, option: Option, value: str) -> None:
        """Set the number of nodes; of a range, `2-4` or `2:4`, the smallest."""
        match = re.fullmatch("0*([1-9][0-9]{0,5})([-:].*)?", value)
        if match is None:
            return
        number, found = int(match[1]), self.found
        if match[2]:
            why = f"a spec has one number of nodes: {number}"
            self._findings.lose(f"{program} {option.text}", why, self._line)
        before = found.given.get("nodes")
        if before is not None and before.option.value and fixed_number(before.option.value) != number:
            why = f"{program} {option.text} (line {self._line}) starts ranks on {number}: the spec has {number}"
            self._findings.lose(before.text, why, before.line)
        nodes = Option(name="nodes", value=Text(str(number)), text=option.text)
        found.given["nodes"] = Given(option=nodes, line=self._line, of=program)
        found.settled.add(option.name)

    def _find_hosts(self, level: Level, fixed: Mapping[str, Option]) -> tuple[Option, list[Host]] | None:
        """Find the hosts that a line names, or those of the hostfile that it names, if it can be read."""
        for name in (*_HOST_LISTS, *_HOSTFILES):
            option = fixed.get(name)
            value = option.value.text if option and option.value else ""
            if option is None or not value:
                continue
            try:
                hosts = _included(value) if name == "include" else self._read_hosts(name, value)
            except ClusterddpError:
                why = "its hosts cannot be read: name them in ssh.hosts, and how many in resources.nodes"
                self._findings.lose(f"{level.program} {option.text}", why, self._line)
                continue
            return option, hosts
        return None

    def _read_hosts(self, name: str, value: str) -> list[Host]:
        read = parse_hosts(value) if name in _HOST_LISTS else read_hostfile((self._place / value).absolute())
        entries = list_hosts(read.node)
        expand_all(host for host, _ in entries)  # refuses too many
        return _merged((host, slots) for entry, slots in entries for host in expand_all([entry]))


def _included(value: str) -> list[Host]:
    """Read DeepSpeed's `a:0,1@b`: hosts, and the GPUs of each that are used."""
    entries = [part.partition(":") for part in value.split("@") if part]
    return _merged((host, len(gpus.split(",")) if colon else None) for host, colon, gpus in entries)


def _merged(entries: Iterable[Host]) -> list[Host]:
    """Name each host once; the slots of one that is named several times add up, as with mpirun."""
    hosts: dict[str, int | None] = {}
    for host, slots in entries:
        hosts[host] = slots if host not in hosts else (hosts[host] or 1) + (slots or 1)
    return list(hosts.items())


def _place_ranks(hosts: list[Host], total: int | None, per_node: int | None, *, by_node: bool) -> tuple[Host, ...]:
    """Distribute ranks over hosts: fill the slots of each host in order, or one on each host in turn."""
    if per_node:
        needed = -(-total // per_node) if total else len(hosts)
        return tuple((host, per_node) for host, _ in hosts[:needed])
    slots = [number or 1 for _, number in hosts]
    total = min(total or sum(slots), MAX_RANKS)
    if by_node or total > sum(slots):
        each, more = divmod(total, len(hosts))
        placed = [each + (index < more) for index in range(len(hosts))]
    else:
        placed = [max(0, min(number, total - sum(slots[:index]))) for index, number in enumerate(slots)]
    return tuple((host, number) for (host, _), number in zip(hosts, placed, strict=True) if number)


def _number(option: Option | None) -> int | None:
    return fixed_number(option.value) if option and option.value else None
