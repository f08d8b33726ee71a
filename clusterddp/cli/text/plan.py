"""Show a plan as text or JSON, for `submit --dry-run`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import duration, rank_span, table, wrapped
from clusterddp.spec.secret_values import hide_secret_words
from clusterddp.spec.train import GENERATED
from clusterddp.system.units import format_bytes, format_count
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.places.slurm.launcher import Verdict
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.ssh import SshNode, SshPlan
    from clusterddp.run.gang import Entry

_MASK = "********"
_COMMAND_SHOWN = 78
"""Characters of the constant command that are shown."""
_INDENT = 12
_SBATCH_SHOWN = ("partition", "account", "qos", "constraint", "nodelist", "reservation", "array")
_MOST_NAMES = 4
NOTE_LINES = 2
"""Lines of a note; all of it is in the verbose plan, and is printed at the submit."""
_CHANGE_LINES = 3
_SHOWN_ELSEWHERE = (
    *("name", "launcher", "resources.", "entry.", "ssh.hosts", "slurm.partition", "slurm.account"),
    *("train.model", "train.dataset", "train.data_dir", "train.image_size", "train.epochs"),
)
"""Keys whose values other lines of the summary have."""
_IN_WHERE = ("launcher", "ssh.hosts")
_TIMES = (
    *("resources.time", "stop.lead", "stop.grace", "hang_after"),
    *("network.start_timeout", "network.host_silence", "network.heartbeat_timeout"),
)
"""Keys whose values are times; a bare number is minutes."""


def masked_plan(plan: Plan, verdict: Verdict | None = None) -> Any:
    """Return the plan as JSON data without the run's secret token.

    `scheduler` is Slurm's answer to `sbatch --test-only`, for a plan for Slurm.
    """
    scheduler = {"scheduler": dataclasses.asdict(verdict)} if verdict else {}
    from clusterddp.planning.plan import plan_on_hosts

    plan = plan_on_hosts(plan)
    return json.loads(json.dumps(plan.to_json() | scheduler).replace(plan.token, _MASK))


def verdict_lines(verdict: Verdict | None, *, verbose: bool, columns: int | None) -> list[str]:
    """Write the scheduler's answer to a plan; of a refusal, all of it."""
    if verdict is None:
        return []
    answers = {True: ("accepts it", "green"), False: ("refuses it", "red"), None: ("was not asked", "yellow")}
    text, colour = answers[verdict.accepted]
    words = f"{verdict.words}; {verdict.cores}" if verdict.cores else verdict.words
    answer = f"{click.style('scheduler', bold=True)} {click.style(text, fg=colour)}: {printable(words)}"
    lines = ["", *cut_lines(answer, columns, NOTE_LINES if verdict.accepted is None and not verbose else None)]
    if verdict.accepted is False:
        from clusterddp.places.slurm.explain import advise_refusal

        lines += [f"  hint: {advice}" for advice in (advise_refusal(verdict.words),) if advice]
    return lines


def plan_lines(plan: Plan, *, verbose: bool, columns: int | None = None) -> list[str]:
    """Write what a submit would do: on one screen, or with all values, variables, files and commands."""
    from clusterddp.planning.plan import plan_on_hosts

    plan = plan_on_hosts(plan)
    more = "" if verbose else "; -v shows all of it"
    lines = [f"plan for {click.style(plan.name, bold=True)}  (nothing is started{more})", ""]
    is_script = plan.gang.entry.kind == "batch_script"
    for name, text in [*_facts(plan), *([] if verbose or is_script else _changes(plan, columns))]:
        lines += wrapped(f"  {name:<9} {printable(text)}", columns, indent=_INDENT)
    lines += _details(plan) if verbose else []
    lines += [""] if plan.notes else []
    for note in plan.notes:
        text = f"{click.style('note:', fg='yellow', bold=True)} {printable(note)}"
        lines += cut_lines(text, columns, None if verbose else NOTE_LINES)
    return lines


def _details(plan: Plan) -> list[str]:
    variables = "those under env and secrets of the spec; no variable of this shell is sent" if plan.ssh else None
    if plan.slurm and plan.gang.entry.kind == "batch_script":
        variables = "all of this shell, as with sbatch"
    elif plan.slurm:
        variables = ", ".join(plan.slurm.variables) or "none"
    lines = [f"  variables {printable(variables)}"] if variables else []
    if plan.gang.entry.kind != "batch_script":
        lines += ["", *_node_table(plan)]
    changes = [["KEY", "VALUE", "DEFAULT", "FROM"]]
    for change in plan.changes:
        value, default = _with_unit(change["key"], change["value"]), value_text(change["default"])
        changes.append([change["key"], value, default, printable(change["origin"])])
    rank0 = [["NAME", "VALUE", "FROM"]]
    for name, variable in sorted(plan.rank0.items()):
        value = variable["value"].replace(plan.token, _MASK)
        rank0.append([name, printable(value) or '""', printable(variable["origin"])])
    for title, rows in (("what differs from the defaults", changes), ("variables of rank 0", rank0)):
        if rows[1:]:
            lines += ["", click.style(title, bold=True), *table(rows, indent="  ")]
    lines += ["", click.style("files", bold=True), *(f"  {printable(path)}" for path in plan.files)]
    if plan.ssh:
        return lines + ssh_lines(plan)
    return [
        *lines,
        "",
        click.style("commands", bold=True),
        *(f"  {printable(shlex.join(argv))}" for argv in plan.commands),
    ]


def _node_table(plan: Plan) -> list[str]:
    """Lay out the nodes, in the order of the node ranks."""
    rows = [["NODE", "HOST", "RANKS", "GPUS", *(["PYTHON"] if plan.ssh else [])]]
    for place, node in enumerate(plan.gang.nodes):
        host = plan.ssh.hosts[place] if plan.ssh else None
        gpus = ",".join(node.gpus) if host is None else f"any {host.gpus}" if host.gpus else ""
        ranks = rank_span(plan.gang.carried_by(node.ranks)) if node.ranks else "spare"
        row = [str(node.node_rank), printable(node.host), ranks, gpus or "-"]
        rows.append(row if host is None else [*row, printable(_python(host))])
    return table(rows, indent="  ")


def ssh_lines(plan: Plan) -> list[str]:
    """Write which files are made and which commands run on the hosts."""
    from clusterddp.planning.plan import files_on_hosts

    assert plan.ssh is not None
    names = [node.host for node in plan.ssh.hosts]
    (command,), *supervisors = plan.commands[:-1]
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
        lines.append(f"    {printable(few([name for name, _ in group]))}: {printable(words(argv))}")
    lines.append("  which starts each of its ranks:")
    lines.append(f"    {printable(words(plan.commands[-1]))}")
    return lines


def _python(host: SshNode) -> str:
    words = [f"module load {' '.join(host.modules)};"] if host.modules else []
    words.append(host.python_words)
    if host.conda and not host.conda.startswith(("/", "~/")):
        words.append(f"(conda environment {host.conda})")
    elif host.python and (host.venv or host.conda):
        words.append(f"(in {host.venv or host.conda})")
    return " ".join(words)


def cut_lines(text: str, columns: int | None, most: int | None) -> list[str]:
    """Break a text into lines, at most so many; what is left out is marked."""
    lines = wrapped(text, columns, indent=2)
    if most is None or columns is None or len(lines) <= most:
        return lines
    last = lines[most - 1]
    return [*lines[: most - 1], f"{last[: columns - 4].rstrip()} ..."]


def _facts(plan: Plan) -> list[tuple[str, str]]:
    gang = plan.gang
    if gang.entry.kind == "batch_script":
        return _script_facts(plan)
    port = "a free port" if gang.master_port is None else f"port {gang.master_port}"
    if plan.ssh:
        interface = "the fastest interface that all hosts reach each other by"
        master = f"{plan.ssh.hosts[0].host}'s address on it"
    else:
        interface = "the interface that reaches node 0" if plan.slurm else "its own choice of interface"
        master = "the first node of the job"
    network = f"{gang.backend} over {gang.interface or interface}; master {gang.master_addr or master}"
    facts = [_runs(plan), ("where", _where(plan)), ("ranks", _ranks(plan)), ("network", f"{network}, {port}")]
    facts.append(("python", python_text(plan)))
    lines = [line.strip() for text in gang.setup for line in text.splitlines() if line.strip()]
    facts += [("setup", f"bash on each node: {few(lines)}")] if lines else []
    facts.append(("code", _code(plan)))
    facts += _time_facts(plan)
    data = _data(plan)
    facts += [("data", data)] if data else []
    facts.append(("output", _output(plan)))
    if plan.secrets:
        facts.append(("secrets", ", ".join(plan.secrets)))
    if plan.parent:
        facts.append(("repeats", plan.parent))
    files = Counter(change["file"] for change in plan.changes if change.get("file"))
    if files:
        facts.append(("values", ", ".join(f"{number} from {file}" for file, number in files.items())))
    return facts + (_ssh_facts(plan.ssh, with_code=plan.snapshot is not None) if plan.ssh else [])


def _script_facts(plan: Plan) -> list[tuple[str, str]]:
    """Say what is known of a batch script before it runs: no line of it is read but its #SBATCH lines."""
    entry, slurm = plan.gang.entry, plan.slurm
    script = _near(plan.spec["entry"]["batch_script"], plan)
    facts = [("script", f"{script}, as it is: its own shell runs it")]
    if entry.args:
        facts.append(("arguments", words(hide_secret_words(entry.args))))
    if slurm is None:
        facts.append(("where", f"{plan.launcher}: this machine"))
    else:
        lines = [line for line in slurm.script.split("\n") if line.startswith("#SBATCH")]
        read = "; ".join(line.removeprefix("#SBATCH").strip() for line in lines) or "none"
        facts += [("where", "slurm: sbatch gets its #SBATCH lines"), ("#SBATCH", read)]
        typed = [change for change in plan.changes if change["key"].startswith("slurm.")]
        own = [f"{change['key']}={value_text(change['value'])}" for change in typed]
        facts += [("override", ", ".join(own))] if own else []
    facts.append(("ranks", "those that srun, torchrun, mpirun, accelerate and deepspeed start in it"))
    facts.append(("directory", entry.working_dir))
    facts.append(("output", f"as with sbatch, and {_near(plan.dir_on_hosts, plan)}: logs of each rank"))
    return facts + ([("repeats", plan.parent)] if plan.parent else [])


def _runs(plan: Plan) -> tuple[str, str]:
    train = plan.spec.get("train")
    if not train:
        return "runs", entry_text(plan.gang.entry)
    batch = train["batch_size"] * plan.gang.world_size * train["accumulate"]
    size = f" at {train['image_size']} pixels" if train.get("image_size") else ""
    what = f"{train['model']} on {train['dataset']}{size}, {train['epochs']} epochs"
    return "trains", f"{what}, batch {train['batch_size']} per rank = {batch} in all"


def entry_text(entry: Entry) -> str:
    """Write what an entry runs: a command line, or a call; a file of the snapshot by its place there."""
    if entry.is_call:
        return printable(entry.target)
    if entry.kind == "function":
        named = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in entry.kwargs.items()]
        values = [json.dumps(value, ensure_ascii=False) for value in entry.args]
        return printable(f"{entry.target}({', '.join([*values, *named])})")
    shell = ["/bin/sh", "-c"] if entry.shell else []
    target = entry.target.removeprefix(f"{entry.code_dir}/") if entry.code_dir else entry.target
    return words([*shell, target, *entry.words, *entry.args])


def _where(plan: Plan) -> str:
    if plan.in_hold:
        return f"{plan.launcher}: in hold {plan.in_hold}"
    if plan.ssh:
        return f"ssh: {few([host.host for host in plan.ssh.hosts])}"
    if plan.slurm is None:
        return f"{plan.launcher}: this machine"
    options = plan.slurm.sbatch_options
    asked = [f"{name} {options[name]}" for name in _SBATCH_SHOWN if name in options]
    asked += ["in a container"] if plan.slurm.container else []
    return f"slurm: {', '.join(asked)}" if asked else "slurm"


def few(names: Sequence[str]) -> str:
    """Write names, of many the first three and a number."""
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _ranks(plan: Plan) -> str:
    gang = plan.gang
    per_node = sorted({len(node.ranks) for node in gang.members})
    many = f"{per_node[0]}" if len(per_node) == 1 else f"{per_node[0]} to {per_node[-1]}"
    nodes, threads = format_count(len(gang.members), "node"), gang.threads_per_rank
    cores = f"{format_count(threads, 'thread')} each" if threads else "sharing the job's cores"
    has_gpus = any(node.gpus for node in gang.nodes) or (plan.slurm is not None and not gang.on_cpu)
    has_gpus = has_gpus or (plan.ssh is not None and plan.ssh.hosts[0].gpus > 0)
    idle = f" ({gang.num_ranks} of {plan.num_gpus})" if plan.num_gpus > gang.num_ranks else ""
    device = f"one GPU each{idle}" if has_gpus else "on the CPU"
    if gang.entry.spawns:
        device = f"all GPUs of its node each{idle}" if has_gpus else "on the CPU"
        own = " + ".join(map(str, gang.entry.spawns)) if len(set(gang.entry.spawns)) > 1 else str(gang.entry.spawns[0])
        return f"{nodes}, one program on each, {device}; it starts {own} ranks, {cores}"
    spares = len(gang.nodes) - len(gang.members)
    more = f", and {format_count(spares, 'spare')}" if spares else ""
    return f"{nodes} x {many} = {format_count(gang.world_size, 'rank')}, {device}, {cores}{more}"


def python_text(plan: Plan) -> str:
    """Write which Python runs the ranks, and why; how to choose another one where no key of the spec names it."""
    python = plan.gang.python
    if plan.ssh:
        pythons = [_python(host) for host in plan.ssh.hosts]
        alike = pythons[0] if len(set(pythons)) == 1 else "another one on some hosts (-v lists them)"
        where, version = f"{alike} on the hosts", ""
    elif plan.slurm and plan.slurm.container:
        where, version = f"{plan.slurm.container['python']} in the container", ""
    else:
        build = "" if not python.cuda or "+" in str(python.torch) else f" for CUDA {python.cuda}"
        torch = f", torch {python.torch}{build}" if python.torch else ", no torch"
        where = _near(python.executable or sys.executable, plan)
        version = f" ({python.version}{torch})" if python.version else ""
    if python.prefix:
        where = f"{python.kind} {python.name}, {where}"
    if not python.version and not python.executable and not plan.elsewhere:
        return f"{python.why}; venv: or conda: puts an environment first there"
    others = "" if python.is_named or plan.spec.get("train") else "; venv:, conda: or python: names another"
    if python.by_setup:
        return f"the one that the setup lines put first on PATH, else {where}{version}: {python.why}"
    return f"{where}{version}: {python.why}{others}"


def _code(plan: Plan) -> str:
    snapshot = plan.snapshot
    if not snapshot:
        return "no snapshot: it runs from its own place" if plan.spec.get("entry") else "the trainer of clusterddp"
    size, files = format_bytes(snapshot["bytes"]), format_count(snapshot["files"], "file")
    text = f"snapshot of {_near(snapshot['root'], plan)}: {files}, {size}"
    if snapshot.get("left_out"):
        return f"{text}; left out: {snapshot['left_out']}"
    if not snapshot["ignored"] or not plan.spec.get("entry"):
        return text
    return f"{text}; {'links to' if plan.has_own_code else 'without'} {few(snapshot['ignored'])}"


def _time_facts(plan: Plan) -> list[tuple[str, str]]:
    gang, limit = plan.gang, plan.spec["resources"]["time"]
    facts = []
    if gang.time_limit_s or limit:
        shown = duration(gang.time_limit_s) if gang.time_limit_s else _with_unit("resources.time", limit)
        facts.append(("time", f"{shown}; asked to stop {duration(gang.stop_lead_s)} before"))
    if gang.restarts:
        facts.append(("restarts", f"up to {gang.restarts}, from the newest checkpoint"))
    return facts


def _data(plan: Plan) -> str | None:
    train = plan.spec.get("train")
    if train and train["dataset"] in GENERATED:
        return None
    place = train["data_dir"] if train else plan.gang.entry.data_dir
    return None if place is None else _near(str(place), plan)


def _output(plan: Plan) -> str:
    run = _near(plan.dir_on_hosts, plan)
    own = plan.gang.entry.output_dir
    if plan.ssh is None:
        return f"{run}: logs" + (f"; {{output_dir}} is {_near(own, plan)}" if own else ", metrics, checkpoints")
    fetched = [*plan.ssh.fetch]
    if "checkpoints" in fetched and own and own.startswith(f"{plan.dir_on_hosts}/"):
        fetched.append("the first host's output/")
    copied = f"copied to {_near(str(plan.run_dir), plan)}: {', '.join(fetched)}" if fetched else ""
    return f"{own or run} on the hosts; {copied or 'nothing is copied here'}"


def _ssh_facts(ssh: SshPlan, *, with_code: bool) -> list[tuple[str, str]]:
    data = [f"{format_bytes(sum(one.bytes for one in ssh.send))} of data"] if ssh.send else []
    parts = " and ".join([*(["the code"] if with_code else []), *data])
    facts = [("sends", f"{parts} to each host, without what is there already" if parts else "nothing")]
    if any(node.gpus for node in ssh.hosts):
        facts.append(("busy GPUs", "the run is refused"))
    return facts


def _changes(plan: Plan, columns: int | None) -> list[tuple[str, str]]:
    """List the values that differ from the defaults: those of the command line first, no more than fit."""
    given = [change for change in plan.changes if not str(change["origin"]).startswith("the ")]  # nor from other values
    typed = [change for change in given if not _in_a_file(change) and change["key"] not in _IN_WHERE]
    of_files = [change for change in plan.changes if _in_a_file(change)]
    others = [change for change in of_files if not change["key"].startswith(_SHOWN_ELSEWHERE)]
    room = None if columns is None else (columns - _INDENT) * _CHANGE_LINES - len("and 999 more")
    shown: list[str] = []
    for change in [*typed, *others]:
        text = f"{change['key']}={_with_unit(change['key'], change['value'])}"
        if room is not None and len(", ".join([*shown, text])) > room:
            break
        shown.append(text)
    left = len(typed) + len(others) - len(shown)
    return [("changed", ", ".join([*shown, *([f"and {left} more"] if left else [])]))] if shown or left else []


def _in_a_file(change: dict[str, Any]) -> bool:
    """Return whether a value comes from a line of a file, and not from the command line or the environment."""
    _, _, line = str(change["origin"]).rpartition(":")
    return line.isdecimal()


def value_text(value: Any) -> str:
    """Write a value of the spec for a table."""
    return printable(value if isinstance(value, str) else json.dumps(value))


def _with_unit(key: str, value: Any) -> str:
    return f"{value} min" if key in _TIMES and str(value).isdecimal() else value_text(value)


def words(argv: Sequence[str]) -> str:
    """Quote a command for a shell; a path from ~/ keeps it."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in argv)


def _near(path: str, plan: Plan) -> str:
    """Write a path below the working directory from there."""
    place = Path(path)
    inside = place != plan.working_dir and place.is_relative_to(plan.working_dir)
    return str(place.relative_to(plan.working_dir)) if inside else path
