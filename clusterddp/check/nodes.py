"""Judge the reports of a job's nodes: each by itself, and against the machine of the submit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from clusterddp.check.job import JobAnswer, Report, Way
from clusterddp.facts.checks import Check, Needs, Result, note, ok, red
from clusterddp.facts.judge import CLOCK_RED_S, judge_clock, judge_locked_memory, judge_machine
from clusterddp.facts.judge_torch import minor_version
from clusterddp.facts.machine import Machine
from clusterddp.facts.torch import Torch
from clusterddp.network.interface import is_loopback
from clusterddp.system.units import format_bytes

_SHARED_FIX = "--runs DIR or CLUSTERDDP_RUNS names a directory on storage that all nodes share"
_SAME_FIX = "one environment on storage that all nodes share, or the same one installed on each"
_RAISE_LOCKED = (
    "slurm.propagate=NONE: the node's own limit, not that of the shell which submits; where that is low, too, "
    "LimitMEMLOCK=infinity for slurmd"
)


def judge_nodes(answer: JobAnswer, here: Machine, needs: Needs) -> list[Check]:
    """Judge every node of the job, also those that sent no report."""
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
    yield "Python", _judge_python(machine, here)
    for name, result in judge_machine(machine, needs):
        if name == "runs directory":
            yield name, _judge_directory(result, report)
        elif name == "torch":
            yield name, _judge_torch(result, machine.torch, here.torch)
        elif name != "clock":
            yield name, result
    yield "locked memory", judge_locked_memory(machine, _RAISE_LOCKED, nccl=needs.num_gpus > 0)
    if report["way"] is not None:
        yield f"way to {report['way']['name']}", _judge_way(report["way"])
    yield "clock", _judge_clock(report, machine, answer)
    yield "size", ok(f"{machine.cores} cores for the task, {format_bytes(machine.memory_bytes)} memory")


def _judge_directory(result: Result, report: Report) -> Result:
    if report["nonce"] != "same":
        path = report["machine"].directory.path
        return red(f"{path} is another directory there: {report['nonce']}", _SHARED_FIX)
    return dataclasses.replace(result, found=f"{result.found}, the same as here")


def _judge_python(machine: Machine, here: Machine) -> Result:
    if machine.python == here.python:
        return ok(machine.python)
    if minor_version(machine.python) == minor_version(here.python):
        return note(f"{machine.python}, here {here.python}")
    return red(f"{machine.python} in {machine.executable}, here {here.python}", _SAME_FIX)


def _judge_torch(result: Result, there: Torch | None, here: Torch | None) -> Result:
    """Compare versions only where both sides have one."""
    if result.level == "red" or not (there and here and there.version and here.version):
        return result
    if there.version != here.version:
        return red(f"{there.version}, here {here.version}", _SAME_FIX)
    return result


def _judge_way(way: Way) -> Result:
    name, addresses = way["name"], way["addresses"]
    if way["reached"] is not None:
        by = f" by {way['interface']}" if way.get("interface") else ""
        return ok(f"{way['reached']}, from {way.get('source', '?')}{by}")
    if addresses and all(map(is_loopback, addresses)):
        return red(
            f"{name} is {', '.join(addresses)} here, which is this host itself",
            f"the real address of {name} in /etc/hosts or DNS",
        )
    if not addresses:
        return red(way["error"], f"the address of {name} in /etc/hosts or DNS")
    return red(f"not reached: {way['error']}", "the nodes' firewall has to let jobs connect to each other")


def _judge_clock(report: Report, machine: Machine, answer: JobAnswer) -> Result:
    """Compare clocks: with the first node's by its answer, with this machine's by the times of submit and report."""
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
    """Explain why a node sent no report, by the output of srun if it has the reason."""
    lines = [line for line in answer.output if f"{node}:" in line or "execve" in line]
    if lines:
        lines.sort(key=lambda line: "execve" not in line)  # the cause, before "task 1: Exited with exit code 2"
        return red(f"no report: {lines[0]}", f"srun -w {node} {here.executable} -V")
    return red(
        "no report; it may not see the runs directory",
        f"srun -w {node} ls -d {here.directory.path}; --runs DIR names storage that all nodes share",
    )
