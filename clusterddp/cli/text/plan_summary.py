"""Show a plan on one screen: what runs where, its code, time, data and output, what was changed, and the notes."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clusterddp.cli.terminal import duration, wrapped
from clusterddp.look.printable import printable
from clusterddp.spec.image_sets import GENERATED
from clusterddp.system.units import format_bytes, format_count

if TYPE_CHECKING:
    from clusterddp.planning.plan import Plan
    from clusterddp.planning.ssh.plan import SshPlan
    from clusterddp.run.gang import Entry

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


def summary_lines(plan: Plan, *, columns: int | None, verbose: bool) -> list[str]:
    """Write the facts of a plan, each on a line of its own as far as the width allows."""
    facts = [*_facts(plan), *([] if verbose else _changes(plan, columns))]
    lines = []
    for name, text in facts:
        lines += wrapped(f"  {name:<9} {printable(text)}", columns, indent=_INDENT)
    return lines


def note_lines(plan: Plan, *, columns: int | None, verbose: bool) -> list[str]:
    """Write the notes; each at most two lines long, unless `verbose`."""
    lines = []
    for note in plan.notes:
        text = f"{click.style('note:', fg='yellow', bold=True)} {printable(note)}"
        lines += cut_lines(text, columns, None if verbose else NOTE_LINES)
    return lines


def cut_lines(text: str, columns: int | None, most: int | None) -> list[str]:
    """Break a text into lines, at most so many; what is left out is marked."""
    lines = wrapped(text, columns, indent=2)
    if most is None or columns is None or len(lines) <= most:
        return lines
    last = lines[most - 1]
    return [*lines[: most - 1], f"{last[: columns - 4].rstrip()} ..."]


def _facts(plan: Plan) -> list[tuple[str, str]]:
    gang = plan.gang
    port = "a free port" if gang.master_port is None else f"port {gang.master_port}"
    network = f"{gang.backend} over {gang.interface or _interface(plan)}; master {gang.master_addr or _master(plan)}"
    facts = [_runs(plan), ("where", _where(plan)), ("ranks", _ranks(plan)), ("network", f"{network}, {port}")]
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
    if entry.kind == "function":
        named = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in entry.kwargs.items()]
        values = [json.dumps(value, ensure_ascii=False) for value in entry.args]
        return printable(f"{entry.target}({', '.join([*values, *named])})")
    local_rank = ["--local_rank=N"] if entry.local_rank_arg else []
    shell = ["/bin/sh", "-c"] if entry.shell else []
    target = entry.target.removeprefix(f"{entry.code_dir}/") if entry.code_dir else entry.target
    return words([*shell, target, *entry.words, *local_rank, *entry.args])


def _where(plan: Plan) -> str:
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
        return "no snapshot: it runs from its own place" if plan.spec.get("entry") else "the trainer of clusterddp"
    size, files = format_bytes(snapshot["bytes"]), format_count(snapshot["files"], "file")
    return f"snapshot of {_near(snapshot['root'], plan)}: {files}, {size}{_beside(plan, snapshot)}"


def _beside(plan: Plan, snapshot: Mapping[str, Any]) -> str:
    """Write what the snapshot does not contain of what lies beside the code."""
    ignored = snapshot.get("ignored", ())  # a plan of an older version does not have it
    if snapshot.get("left_out"):
        return f"; left out: {snapshot['left_out']}"
    if not ignored or not plan.spec.get("entry"):
        return ""
    return f"; {'links to' if plan.has_own_code else 'without'} {few(ignored)}"


def _time_facts(plan: Plan) -> list[tuple[str, str]]:
    gang, limit = plan.gang, plan.spec["resources"]["time"]
    facts = []
    if gang.time_limit_s or limit:
        shown = duration(gang.time_limit_s) if gang.time_limit_s else str(limit)
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
    if ssh.attached:
        facts.append(("attached", "the run ends with the process that submits it"))
    return facts


def _changes(plan: Plan, columns: int | None) -> list[tuple[str, str]]:
    """List the values that differ from the defaults: those of the command line first, no more than fit."""
    typed = [change for change in plan.changes if not _in_a_file(change) and change["key"] not in _IN_WHERE]
    of_files = [change for change in plan.changes if _in_a_file(change)]
    others = [change for change in of_files if not change["key"].startswith(_SHOWN_ELSEWHERE)]
    room = None if columns is None else (columns - _INDENT) * _CHANGE_LINES - len("and 999 more")
    shown: list[str] = []
    for change in [*typed, *others]:
        text = f"{change['key']}={value_text(change['value'])}"
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


def words(argv: Sequence[str]) -> str:
    """Quote a command for a shell; a path from ~/ keeps it."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in argv)


def _near(path: str, plan: Plan) -> str:
    """Write a path below the working directory from there."""
    place = Path(path)
    inside = place != plan.working_dir and place.is_relative_to(plan.working_dir)
    return str(place.relative_to(plan.working_dir)) if inside else path
