"""Show a plan as text or JSON, for `submit --dry-run`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import duration, rank_span, table
from clusterddp.look.printable import printable
from clusterddp.system.units import format_bytes, format_count

if TYPE_CHECKING:
    from clusterddp.launchers.slurm.ask import Verdict
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.ssh.plan import SshNode, SshPlan
    from clusterddp.run.gang import Entry

_MASK = "********"
_COMMAND_SHOWN = 78
"""Characters of the constant command that are shown."""


def masked_plan(plan: Plan, verdict: Verdict | None = None) -> Any:
    """Return the plan as JSON data without the run's secret token.

    `scheduler` is Slurm's answer to `sbatch --test-only`, for a plan for Slurm.
    """
    scheduler = {"scheduler": dataclasses.asdict(verdict)} if verdict else {}
    if plan.ssh:
        from clusterddp.planning.plan import plan_on_hosts

        plan = plan_on_hosts(plan)
    return json.loads(json.dumps(plan.to_json() | scheduler).replace(plan.token, _MASK))


def verdict_lines(verdict: Verdict | None) -> list[str]:
    """Write the scheduler's answer to a plan."""
    if verdict is None:
        return []
    answers = {True: ("accepts it", "green"), False: ("refuses it", "red"), None: ("was not asked", "yellow")}
    text, colour = answers[verdict.accepted]
    lines = ["", f"{click.style('scheduler', bold=True)} {click.style(text, fg=colour)}: {printable(verdict.words)}"]
    if verdict.accepted is False:
        from clusterddp.slurm.explain import advise_refusal

        lines += [f"  hint: {advice}" for advice in (advise_refusal(verdict.words),) if advice]
    return lines


def plan_lines(plan: Plan) -> list[str]:
    """Write everything that a submit would do."""
    if plan.ssh:
        from clusterddp.planning.plan import plan_on_hosts

        plan = plan_on_hosts(plan)
    lines = [f"plan for {click.style(plan.run, bold=True)}  (dry run: nothing was started or written)", ""]
    lines += [f"  {name:<9} {printable(text)}" for name, text in _facts(plan)]
    lines += ["", *_node_table(plan)]
    for title, rows in (
        ("what differs from the defaults", _change_rows(plan)),
        ("variables of rank 0", _variable_rows(plan)),
    ):
        if rows[1:]:
            lines += ["", click.style(title, bold=True), *table(rows, indent="  ")]
    lines += ["", click.style("files", bold=True), *(f"  {printable(path)}" for path in plan.files)]
    lines += ssh_lines(plan) if plan.ssh else _command_lines(plan)
    if plan.notes:
        lines += ["", *(f"{click.style('note:', fg='yellow', bold=True)} {printable(note)}" for note in plan.notes)]
    return lines


def _command_lines(plan: Plan) -> list[str]:
    return ["", click.style("commands", bold=True), *(f"  {printable(shlex.join(argv))}" for argv in plan.commands)]


def _facts(plan: Plan) -> list[tuple[str, str]]:
    gang = plan.gang
    port = "a free port, found at the start" if gang.master_port is None else f"port {gang.master_port}"
    facts = [("launcher", plan.launcher), ("ranks", _ranks(plan))]
    facts.append(("backend", f"{gang.backend} over {gang.interface or _interface(plan)}"))
    facts.append(("master", f"{gang.master_addr or _master(plan)}, {port}"))
    train = plan.spec.get("train")
    if not train:
        facts.append(("runs", entry_text(gang.entry)))
    else:
        batch = train["batch_size"] * gang.world_size * train["accumulate"]
        size = f" at {train['image_size']} pixels" if train.get("image_size") else ""
        what = f"{train['model']} on {train['dataset']}{size}, {train['epochs']} epochs"
        facts.append(("training", f"{what}, batch {train['batch_size']} per rank = {batch} in all"))
    facts.append(("code", _code(plan)))
    if gang.time_limit_s:
        facts.append(("time", f"{duration(gang.time_limit_s)}; asked to stop {duration(gang.stop_lead_s)} before"))
    if gang.start == "torchrun":
        facts.append(("start", "torchrun on each node, which starts the node's ranks"))
    if gang.restarts:
        by = " by torchrun" if gang.start == "torchrun" else ""
        facts.append(("restarts", f"up to {gang.restarts}{by}, from the newest checkpoint"))
    if plan.slurm:
        facts.append(("variables", ", ".join(plan.slurm.variables) or "none"))
    if plan.ssh:
        facts += ssh_facts(plan.ssh, with_code=plan.snapshot is not None)
    if plan.secrets:
        facts.append(("secrets", ", ".join(plan.secrets)))
    if plan.parent:
        facts.append(("repeats", plan.parent))
    return facts


def entry_text(entry: Entry) -> str:
    """Write what an entry runs: a command line, or a call."""
    if entry.kind == "function":
        named = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in entry.kwargs.items()]
        values = [json.dumps(value, ensure_ascii=False) for value in entry.args]
        return printable(f"{entry.target}({', '.join([*values, *named])})")
    local_rank = ["--local_rank=N"] if entry.local_rank_arg else []
    shell = ["/bin/sh", "-c"] if entry.shell else []
    return words([*shell, entry.target, *entry.words, *local_rank, *entry.args])


def _interface(plan: Plan) -> str:
    if plan.ssh:
        return "the fastest interface that all hosts reach each other by"
    return "the interface that reaches node 0" if plan.slurm else "its own choice of interface"


def _master(plan: Plan) -> str:
    return f"{plan.ssh.hosts[0].host}'s address on it" if plan.ssh else "the first node of the job"


def _ranks(plan: Plan) -> str:
    gang = plan.gang
    per_node = sorted({len(node.ranks) for node in gang.nodes})
    many = f"{per_node[0]}" if len(per_node) == 1 else f"{per_node[0]} to {per_node[-1]}"
    nodes, threads = format_count(len(gang.nodes), "node"), format_count(gang.threads_per_rank, "thread")
    has_gpus = any(node.gpus for node in gang.nodes) or (plan.slurm is not None and not gang.on_cpu)
    has_gpus = has_gpus or (plan.ssh is not None and plan.ssh.hosts[0].gpus > 0)
    device = "one GPU each" if has_gpus else "on the CPU"
    if gang.entry.spawns:
        device = "all GPUs of its node each" if has_gpus else "on the CPU"
        own = " + ".join(map(str, gang.entry.spawns)) if len(set(gang.entry.spawns)) > 1 else str(gang.entry.spawns[0])
        return f"{nodes}, one program on each, {device}; it starts {own} ranks, {threads} each"
    return f"{nodes} x {many} = {format_count(gang.world_size, 'rank')}, {device}, {threads} each"


def _code(plan: Plan) -> str:
    snapshot = plan.snapshot
    if not snapshot:
        return "no snapshot" + (": it runs from its own place" if plan.spec.get("entry") else "")
    size = format_bytes(snapshot["bytes"])
    return f"snapshot of {snapshot['root']} ({snapshot['source']}): {format_count(snapshot['files'], 'file')}, {size}"


def _node_table(plan: Plan) -> list[str]:
    if plan.ssh:
        return ssh_table(plan)
    rows = [["NODE", "HOST", "RANKS", "GPUS"]]
    rows += [
        [
            str(node.node_rank),
            printable(node.host),
            rank_span(plan.gang.carried_by(node.ranks)),
            ",".join(node.gpus) or "-",
        ]
        for node in plan.gang.nodes
    ]
    return table(rows, indent="  ")


def _change_rows(plan: Plan) -> list[list[str]]:
    rows = [["KEY", "VALUE", "DEFAULT", "FROM"]]
    for change in plan.changes:
        value, default = value_text(change["value"]), value_text(change["default"])
        rows.append([change["key"], value, default, printable(change["origin"])])
    return rows


def _variable_rows(plan: Plan) -> list[list[str]]:
    rows = [["NAME", "VALUE", "FROM"]]
    for name, variable in sorted(plan.rank0.items()):
        value = variable["value"].replace(plan.token, _MASK)
        rows.append([name, printable(value) or '""', printable(variable["origin"])])
    return rows


def value_text(value: Any) -> str:
    """Write a value of the spec for a table."""
    return printable(value if isinstance(value, str) else json.dumps(value))


def ssh_facts(ssh: SshPlan, *, with_code: bool) -> list[tuple[str, str]]:
    """Return the facts that are the same for all hosts."""
    data = [f"{format_bytes(sum(one.bytes for one in ssh.send))} of data"] if ssh.send else []
    parts = " and ".join([*(["the code"] if with_code else []), *data])
    facts = [("sends", f"{parts} to each host, without what is there already" if parts else "nothing")]
    facts.append(("variables", "those under env and secrets of the spec; no variable of this shell is sent"))
    facts.append(("fetches", ", ".join(ssh.fetch) or "nothing: all results stay on the hosts"))
    if any(node.gpus for node in ssh.hosts):
        facts.append(("busy GPUs", "the run waits for them" if ssh.when_busy == "wait" else "the run is refused"))
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
    """Write which files are made and which commands run on the hosts."""
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
        files = format_count(send.files, "file")
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
    """Quote a command for a shell; a path from ~/ keeps it."""
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
