"""What the reports of the nodes mean: each by itself, and against the machine that one submits from."""

from __future__ import annotations

from collections.abc import Iterator

from clusterddp.check.job import JobAnswer, Report, Way
from clusterddp.facts.checks import Check, Result, note, ok, red
from clusterddp.facts.judge import (
    CLOCK_RED_S,
    Needs,
    judge_clock,
    judge_locked_memory,
    judge_machine,
    size,
    weak_locks,
)
from clusterddp.facts.machine import Machine
from clusterddp.facts.torch import Torch

_OF_NODES = ("torch", "GPUs", "open files", "shared memory")
"""Checks of a machine that are asked of each node as they are asked here."""
_RAISE_LOCKED = (
    "slurm.propagate=NONE: the node's own limit, not that of the shell which submits; where that is low, too, "
    "LimitMEMLOCK=infinity for slurmd"
)


def judge_nodes(answer: JobAnswer, here: Machine, needs: Needs) -> list[Check]:
    """Judge every node of the job, those that were not heard of too."""
    found: dict[str, dict[str, Result]] = {"report": {}}
    for node in answer.nodes:
        report = answer.reports.get(node)
        if report is None:
            found["report"][node] = _no_report(node, answer, here)
            continue
        for name, result in _judge_node(report, answer, here, needs):
            found.setdefault(name, {})[node] = result
    return [Check(name=name, results=results) for name, results in found.items() if results]


def _judge_node(report: Report, answer: JobAnswer, here: Machine, needs: Needs) -> Iterator[tuple[str, Result]]:
    machine = report["machine"]
    yield "runs directory", _judge_directory(report, machine)
    yield "Python", _judge_python(machine, here)
    for name, result in judge_machine(machine, needs):
        if name in _OF_NODES:
            yield name, _judge_torch(result, machine.torch, here.torch) if name == "torch" else result
    yield "locked memory", judge_locked_memory(machine, _RAISE_LOCKED, nccl=needs.gpus_per_node > 0)
    if report["way"] is not None:
        yield f"way to {report['way']['name']}", _judge_way(report["way"])
    yield "clock", _judge_clock(report, machine, answer)
    yield "size", ok(f"{machine.cores} cores for the task, {size(machine.memory_bytes)} memory")


def _judge_directory(report: Report, machine: Machine) -> Result:
    directory = machine.directory
    fix = "--runs DIR or CLUSTERDDP_RUNS names a directory on storage that all nodes share"
    if report["nonce"] != "same":
        return red(f"{directory.path} is not what it is here: {report['nonce']}", fix)
    if directory.error is not None:
        return red(f"{directory.path}: cannot be written: {directory.error}", fix)
    found = f"the same as here, {size(directory.free_bytes or 0)} free"
    return weak_locks(directory, found) or ok(found)


def _judge_python(machine: Machine, here: Machine) -> Result:
    if machine.python == here.python:
        return ok(machine.python)
    if machine.python.split(".")[:2] == here.python.split(".")[:2]:
        return note(f"{machine.python}, here {here.python}")
    return red(
        f"{machine.python} in {machine.executable}, here {here.python}",
        "one environment on storage that all nodes share, or the same one installed on each",
    )


def _judge_torch(result: Result, there: Torch | None, here: Torch | None) -> Result:
    """Compare versions only where both sides have one."""
    if result.level == "red" or not (there and here and there.version and here.version):
        return result
    if there.version != here.version:
        return red(
            f"{there.version}, here {here.version}",
            "one environment on storage that all nodes share, or the same one installed on each",
        )
    return result


def _judge_way(way: Way) -> Result:
    name, addresses = way["name"], way["addresses"]
    if way["reached"] is not None:
        by = f" by {way['interface']}" if way.get("interface") else ""
        return ok(f"{way['reached']}, from {way.get('source', '?')}{by}")
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        return red(
            f"{name} is {', '.join(addresses)} here, which is this very host",
            f"the real address of {name} in /etc/hosts or DNS",
        )
    if not addresses:
        return red(way["error"], f"the address of {name} in /etc/hosts or DNS")
    return red(f"not reached: {way['error']}", "the nodes' firewall has to let jobs connect to each other")


def _judge_clock(report: Report, machine: Machine, answer: JobAnswer) -> Result:
    """Compare clocks: with the first node by asking it, with this machine by when the report can have been made."""
    way = report["way"]
    if way is not None and "clock_offset_s" in way:
        against_first = judge_clock(way["clock_offset_s"], f"that of {way['name']}")
        if against_first.level != "ok":
            return against_first
    behind = answer.submitted - machine.time
    ahead = machine.time - answer.collected
    offset = behind if behind > 0 else -ahead if ahead > 0 else 0.0
    if abs(offset) >= CLOCK_RED_S:
        return judge_clock(offset, "the clock here")
    return ok("agrees with the clock here")


def _no_report(node: str, answer: JobAnswer, here: Machine) -> Result:
    """Say why a node was not heard of, in the words of srun if it had any."""
    words = [line for line in answer.words if f"{node}:" in line or "execve" in line]
    if words:
        words.sort(key=lambda line: "execve" not in line)  # the cause, before "task 1: Exited with exit code 2"
        return red(f"nothing was heard: {words[0]}", f"srun -w {node} {here.executable} -V")
    return red(
        "nothing was heard; it may not see the runs directory",
        f"srun -w {node} ls -d {here.directory.path}; --runs DIR names storage that all nodes share",
    )
