"""How the plan of a run over SSH is shown: its hosts, what is uploaded, what is started, what is downloaded."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from clusterddp.cli.terminal import rank_span, table
from clusterddp.look.printable import printable
from clusterddp.system.byte_sizes import format_bytes

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.ssh import SshNode, SshPlan

_COMMAND_SHOWN = 78
"""Characters of the constant command that are shown."""


def ssh_facts(ssh: SshPlan, *, with_code: bool) -> list[tuple[str, str]]:
    """Name what holds for all hosts."""
    data = [f"{format_bytes(sum(one.bytes for one in ssh.send))} of data"] if ssh.send else []
    parts = " and ".join([*(["the code"] if with_code else []), *data])
    facts = [("sends", f"{parts} to each host, but for what is there already" if parts else "nothing of yours")]
    facts.append(("variables", "those under env and secrets of the spec; none of this shell's go along"))
    facts.append(("fetches", ", ".join(ssh.fetch) or "nothing: all results stay on the hosts"))
    if any(node.gpus for node in ssh.hosts):
        facts.append(("busy GPUs", "it waits in line" if ssh.when_busy == "wait" else "it is refused"))
    if ssh.attached:
        facts.append(("attached", "the run ends with the process that submits it"))
    return facts


def ssh_table(plan: Plan) -> list[str]:
    """Lay out the hosts, in the order of the node ranks."""
    assert plan.ssh is not None
    rows = [["NODE", "HOST", "RANKS", "GPUS", "PYTHON"]]
    for node, host in zip(plan.gang.nodes, plan.ssh.hosts, strict=True):
        gpus = f"any {host.gpus}" if host.gpus else "-"
        ranks = rank_span(plan.gang.carried_by(node.ranks))
        rows.append([str(node.node_rank), printable(node.host), ranks, gpus, printable(_python(host))])
    return table(rows, indent="  ")


def ssh_lines(plan: Plan) -> list[str]:
    """Tell what is written and started on the hosts."""
    from clusterddp.planning.details import files_on_hosts

    assert plan.ssh is not None
    names = [node.host for node in plan.ssh.hosts]
    (command,), *programs = plan.commands[:-1]
    supervisors, agents = programs[: len(names)], programs[len(names) :]
    lines = ["", click.style("files on every host", bold=True)]
    lines += [
        f"  {printable(path)}" for path in files_on_hosts(plan.ssh, plan.dir_on_hosts, with_code=bool(plan.snapshot))
    ]
    for send in plan.ssh.send:
        files = f"{send.files} {'file' if send.files == 1 else 'files'}"
        lines.append(f"  {printable(send.target)}  <- {printable(send.source)} ({files}, {format_bytes(send.bytes)})")
    lines += ["", click.style("commands on the hosts", bold=True)]
    lines.append("  on each, over SSH, one constant command; all else goes to its standard input as data:")
    shown = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]}... ({len(command)} characters)"
    lines.append(f"    {printable(shown)}")
    lines.append("  then on each, detached from SSH, its supervisor:")
    for argv, group in itertools.groupby(zip(names, supervisors, strict=True), key=lambda pair: pair[1]):
        lines.append(f"    {printable(_few([name for name, _ in group]))}: {printable(words(argv))}")
    if agents:
        lines.append("  which starts torchrun:")
        lines += [f"    {printable(name)}: {printable(words(argv))}" for name, argv in zip(names, agents, strict=True)]
    lines.append("  which starts each of its ranks:")
    lines.append(f"    {printable(words(plan.commands[-1]))}")
    return lines


def words(argv: Sequence[str]) -> str:
    """Write a command as a shell takes it; a path from ~/ stays one."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in argv)


def _python(host: SshNode) -> str:
    words = [f"module load {' '.join(host.modules)};"] if host.modules else []
    words.append(host.python_words)
    if host.conda and not host.conda.startswith(("/", "~/")):
        words.append(f"(conda environment {host.conda})")
    elif host.python and (host.venv or host.conda):
        words.append(f"(in {host.venv or host.conda})")
    return " ".join(words)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
