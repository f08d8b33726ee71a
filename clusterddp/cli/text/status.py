"""Show a run as text: its state, progress and ranks, why it failed, and the next commands."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from clusterddp.cli.terminal import WITHOUT_REASON, Column, duration, lay_out, rank_span, state_text, wrapped
from clusterddp.run.attempts import read_end
from clusterddp.run.record import BY_HAND, FOREIGN
from clusterddp.system.files import read_json
from clusterddp.system.units import format_bytes, format_count
from clusterddp.view.effective import PARTS
from clusterddp.view.printable import printable
from clusterddp.view.status import diagnose, has_checkpoint
from clusterddp.view.steps import NO_STEPS

if TYPE_CHECKING:
    from clusterddp.places.slurm.queue import Job
    from clusterddp.run.directory import RunDir
    from clusterddp.run.record import RankEnd
    from clusterddp.view.events import NodeTransport
    from clusterddp.view.progress import Progress
    from clusterddp.view.ranks import RankStatus
    from clusterddp.view.status import Checkpoint, RunStatus

MOST_RANKS_ONE_BY_ONE = 8
_MOST_VALUES_SHOWN = 4
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_FEWEST_BARS = 4
_WITH_JOB = "ended with the job"
_MOSTLY_EFFECTIVE = 0.98
"""From this ratio on a run of one attempt is not said to have lost time."""
_STEP_COLUMNS = 120
"""The width of the table of steps, whose commands may be long, where there is no terminal."""


def warning_text(warning: str) -> str:
    """Write the warning of a run that ended well."""
    return f"{click.style('warning', fg='yellow')}: {printable(warning)}"


def status_lines(
    status: RunStatus, run: RunDir, *, address: str, one_by_one: bool = False, columns: int | None = None
) -> list[str]:
    """Write the status of one run; many ranks are grouped by node, unless `one_by_one`.

    `columns`: the width of the terminal; paths, log lines and commands may be longer, so that they can be copied.
    """
    name, where = printable(status.run), printable(_where(status))
    state = "STOPPING" if status.stopping else status.state.value
    name = click.style(name, bold=True) + (f" ({printable(status.name)})" if status.name else "")
    mark = f"  {click.style(status.mark, fg='yellow')}" if status.mark else ""
    lines = [f"{name}  {state_text(state)}  {where}{mark}"]
    if status.stopping:
        left_s = max(0.0, status.stopping.until - time.time())
        left = f"{status.stopping.reason}: its ranks are ended in {duration(left_s)}"
        rest = "and save nothing: the program has not asked clusterddp.should_stop()"
        rest = "if they have not stopped at a checkpoint by then" if status.stopping.asks else rest
        lines.append(f"  {printable(left)} {rest}")
    if status.reason and not status.root_cause and status.state.value not in WITHOUT_REASON:
        lines.append(f"  {printable(status.reason)}")
    if status.warning:
        lines.append(f"  {warning_text(status.warning)}")
    said = lines[1:]
    lines += [
        f"  {printable(text)}"
        for text in filter(None, (status.nodes_changed, *status.unreachable))
        if not any(text in line for line in said)
    ]
    lines += _progress_lines(status, address)
    if status.start_phases:
        phases = (f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in status.start_phases.items())
        lines.append(f"  start: {', '.join(phases)}")
    lines += _effective_lines(status)
    lines += [f"  NCCL: {printable(text)}" for text in transport_texts(status.transports)]
    pythons = _by_host([(rank.host, rank.python.text) for rank in status.ranks if rank.python])
    lines += [f"  python{' differs' if len(pythons) > 1 else ''}: {printable(text)}" for text in pythons]
    if status.lost_rows:
        lines.append(f"  metrics.jsonl lacks {status.lost_rows} rows, which its storage did not take")
    lines = [each for line in lines for each in wrapped(line, columns, indent=4)]
    lines += [f"  {printable(str(run.path))}"]
    if status.report:
        lines.append(f"  report: {printable(status.report)}")
    if status.checkpoint:
        lines.append(f"  {checkpoint_text(status.checkpoint, finished=status.finished)}")
    lines.append("")
    lines += _step_lines(status, columns)
    if status.hold == status.run:
        return [*lines, *_hold_lines(status, address)]
    table = rank_table if one_by_one or len(status.ranks) <= MOST_RANKS_ONE_BY_ONE else node_table
    lines += table(status.ranks, columns) if status.ranks or status.steps is None else []
    if status.root_cause:
        lines += ["", *root_cause_lines(status.root_cause, run, columns=columns)]
    steps = next_steps(status.state.value, address, run, status.root_cause, job_log=status.job_log)
    return [*lines, "", *steps] if steps else lines


def _hold_lines(status: RunStatus, address: str) -> list[str]:
    """Write which runs are in a hold, and the commands that are useful with it."""
    if status.finished:
        return []
    runs, *waiting = [printable(run) for run in status.held] or ["no run is in it"]
    waits = f"; waiting: {', '.join(waiting)}" if waiting else ""
    start, end = f"clusterddp submit SPEC --in {address}", f"clusterddp cancel {address}"
    return [f"  {'run':<10} {runs}{waits}", "", f"  {'start':<10} {start}", f"  {'cancel':<10} {end}"]


def _effective_lines(status: RunStatus) -> list[str]:
    """Write how much of the time went into steps that count, and where the rest went, if the run has lost time."""
    effective = status.effective
    if effective is None or not (status.attempt or effective.ratio < _MOSTLY_EFFECTIVE):
        return []
    shares = {name: effective.parts[part] / effective.seconds for part, name in PARTS.items() if part != "steps"}
    rest = [f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda each: -each[1]) if share >= 5e-4]
    where = f" ({', '.join(rest)})" if rest else ""
    return [f"  effective {effective.ratio:.1%} of {duration(effective.seconds)} since the first step{where}"]


def _step_lines(status: RunStatus, columns: int | None) -> list[str]:
    """Lay out the steps of a batch script, one a line; no line for another run."""
    steps = status.steps or ()
    if status.steps is None:
        return []
    if not steps:
        over = status.finished or status.state.value == "REQUEUED"
        return [f"  {NO_STEPS}"] if over and status.attempt is not None else []
    now = time.time()
    spent = ["-" if step.started is None else duration((step.ended or now) - step.started) for step in steps]

    def paint(cell: str) -> str:
        return cell if cell == _WITH_JOB else state_text(cell)

    shown = [
        Column(title="STEP", cells=[step.step for step in steps]),
        Column(title="COMMAND", cells=[printable(f"{step.command} {step.program}") for step in steps], least=12),
        Column(title="LINE", cells=[str(step.line or "-") for step in steps], gives_way=3),
        Column(title="RANKS", cells=[str(step.ranks or "-") for step in steps]),
        Column(title="NODES", cells=[str(step.nodes or "-") for step in steps], gives_way=2),
        Column(title="STATE", cells=[_WITH_JOB if each.state == "LOST" else each.state for each in steps], paint=paint),
        Column(title="TIME", cells=spent, gives_way=1),
    ]
    title = ["", f"  step {status.shown_step}:"] if len(steps) > 1 and status.ranks else [""]
    return [*lay_out(shown, room=columns or _STEP_COLUMNS, indent="  "), *title]


def _progress_lines(status: RunStatus, address: str) -> list[str]:
    """Write how far the run is, or when it last wrote something; since when no rank makes progress, and why."""
    lines = []
    if status.progress:
        lines.append(f"  {progress_text(status.progress)}")
        lines += [f"  loss {line}" for line in [sparkline(status.progress.losses)] if line]
    elif status.last_output:
        lines.append(f"  last output {duration(max(0.0, time.time() - status.last_output))} ago")
    if status.hang is None:
        return lines
    what = f"no progress for {duration(time.time() - status.hang.since)}: {printable(status.hang.text)}"
    lines.append(f"  {click.style('hang', fg='yellow')}: {what}")
    lines += [f"    {printable(status.hang.hint)}"] if status.hang.hint else []
    return [*lines, f"    its stacks: clusterddp stacks {address}"]


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars of text, with the first and the last; empty: too few, or the output cannot show them."""
    try:
        _BARS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ""
    if len(values) < _FEWEST_BARS:
        return ""
    low, span = min(values), max(values) - min(values)
    bars = (_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in values)
    return f"{''.join(bars)} {values[0]:.4g} to {values[-1]:.4g}"


def checkpoint_text(checkpoint: Checkpoint, *, finished: bool) -> str:
    """Write after which step the newest checkpoint was written, and where it is; of a run that goes on, its age."""
    where = f" on {printable(checkpoint.host)}" if checkpoint.host else ""
    if finished:
        return f"checkpoint{where}: {printable(checkpoint.path)}, step {checkpoint.step}"
    age = "" if checkpoint.created is None else f", {duration(time.time() - checkpoint.created)} ago"
    return f"checkpoint{where}: step {checkpoint.step}{age}"


def root_cause_lines(cause: RankEnd, run: RunDir, *, columns: int | None = None) -> list[str]:
    """Write why the run failed: the first failure, and the last lines of that rank's standard error."""
    from clusterddp.view.logs import read_log_tail

    known = cause.exit_code is None or f"exit code {cause.exit_code}" in cause.error
    code = "" if known else f"  (exit code {cause.exit_code})"
    what = f"{click.style('root cause:', fg='red', bold=True)} {printable(cause.error)}{code}"
    kind = diagnose(cause, run)
    lines = wrapped(what, columns, indent=2)
    lines += wrapped("; ".join(filter(None, [f"  category: {kind.text}", kind.hint])), columns, indent=4)
    tail = read_log_tail(run.path / cause.log) if cause.log else []
    starts = [number for number, line in enumerate(tail) if line.startswith("Traceback (most recent call last)")]
    tail = tail[starts[-1] :] if starts else tail
    if not tail and cause.traceback:
        tail = [printable(line) for line in cause.traceback.rstrip().split("\n")[-10:]]
    if tail:
        if cause.log:
            lines.append(f"  the end of {run.path / cause.log}:")
        lines += [f"  | {line}" for line in tail]
    return lines


def progress_text(progress: Progress) -> str:
    """Write in one line how far a run is; unknown values are left out."""
    parts = []
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch}" + (f"/{progress.epochs}" if progress.epochs else ""))
    elif progress.step is not None:
        parts.append(f"step {progress.step}" + (f"/{progress.steps}" if progress.steps else ""))
    if progress.fraction is not None:
        parts.append(f"{progress.fraction:.0%}")
    elif progress.epoch is not None and progress.step is not None:
        parts.append(f"step {progress.step}")
    parts += measures(progress)
    if progress.eta_s:
        parts.append(f"{duration(progress.eta_s)} left")
    return "  ".join(parts)


def transport_texts(transports: Sequence[NodeTransport]) -> list[str]:
    """Write by which network and devices NCCL sends, equal nodes together."""
    texts = []
    for transport in transports:
        devices = f" ({', '.join(transport.devices)})" if transport.devices else ""
        links = f", by {', '.join(transport.links)}" if transport.links else ""
        texts.append((transport.host, f"network {transport.network}{devices}{links}"))
    return _by_host(texts)


def _by_host(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Write the texts of hosts, equal ones together; one that all have is written without hosts."""
    hosts: dict[str, list[str]] = {}
    for host, text in texts:
        hosts.setdefault(text, []).append(host)
    return list(hosts) if len(hosts) == 1 else [f"{', '.join(dict.fromkeys(hosts[text]))}: {text}" for text in hosts]


def measures(progress: Progress) -> list[str]:
    """Write loss, accuracy and speed, as far as they are known."""
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.accuracy is not None:
        parts.append(f"accuracy {progress.accuracy:.1%}")
    if progress.images_per_s is not None:
        speed = progress.images_per_s
        parts.append(f"{speed / 1000:.1f}k images/s" if speed >= 10_000 else f"{speed:.0f} images/s")
    for name, value in list(progress.values.items())[:_MOST_VALUES_SHOWN]:
        parts.append(f"{printable(name)} {value if isinstance(value, str) else f'{value:.4g}'}")
    return parts


def short_progress(progress: Progress | None) -> str:
    """Write how far a run is in a few characters."""
    if progress is None:
        return "-"
    epoch = f"{progress.epoch}/{progress.epochs}" if progress.epochs else str(progress.epoch or "")
    fraction = "" if progress.fraction is None else f"{progress.fraction:.0%}"
    if not (epoch or fraction) and progress.step is not None:
        return f"step {progress.step}"
    return " ".join(part for part in (f"epoch {epoch}" if epoch else "", fraction) if part) or "-"


def _where(status: RunStatus) -> str:
    parts = [f"{status.launcher} job {status.job_id}" if status.job_id else status.launcher]
    if status.hold == status.run:
        return ", ".join(["hold", *parts, *(_job_facts(status.job) if status.job else []), *_times_texts(status)])
    parts += [f"in hold {status.hold}"] if status.hold else []
    if status.launcher == FOREIGN:
        parts = [f"started by {status.job_id}"]
    if status.job:
        parts += _job_facts(status.job)
    running = sum(rank.state == "RUNNING" for rank in status.ranks)
    count = format_count(status.world_size, "rank")
    if status.steps is not None and not status.ranks:
        return ", ".join([*parts, *_times_texts(status)])
    if status.ranks and status.ranks[0].owns is not None:
        programs = format_count(len(status.ranks), "program")
        parts.append(f"{running} of {programs} running" if status.state.value == "RUNNING" else programs)
        parts.append(f"{count} of their own")
    else:
        parts.append(f"{running} of {count} running" if status.state.value == "RUNNING" else count)
    return ", ".join([*parts, *_times_texts(status)])


def _times_texts(status: RunStatus) -> list[str]:
    times = status.times
    spent = (("ran", times.running_s), ("queued", times.queued_s), ("stopped", times.stopped_s))
    attempt = [f"attempt {status.attempt}"] if status.attempt else []
    return [*attempt, *(f"{what} {duration(seconds)}" for what, seconds in spent if seconds >= 1)]


def _job_facts(job: Job) -> list[str]:
    """Write Slurm's state of the job when it adds to the run's, and the job's nodes."""
    parts = [] if job.state in {"PENDING", "RUNNING"} else [job.state]
    if job.nodes:
        parts.append(f"on {printable(job.nodes)}")
    elif job.num_nodes:
        parts.append(format_count(job.num_nodes, "node"))
    return [*parts, f"partition {printable(job.partition)}"] if job.partition else parts


def next_steps(
    state: str, address: str, run: RunDir, cause: RankEnd | None, *, job_log: str | None = None
) -> list[str]:
    """Return the commands that are useful now, each with what it does.

    `job_log`: the log to read when no rank was started, relative to the run's directory.
    """
    steps: list[tuple[str, str]] = []
    if state in {"PENDING", "RUNNING", "REQUEUED"}:
        steps = [("follow", f"clusterddp logs -f {address}"), ("cancel", f"clusterddp cancel {address}")]
    elif state in {"FAILED", "LOST"}:
        if job_log:
            steps = [("job's log", f"{run.path / job_log}")]
        elif cause and cause.rank is None:  # no rank was started
            steps = [("logs", f"{run.launcher_dir}/")]
        elif cause or next(run.path.glob("attempts/*/logs/*"), None) is not None:
            step = re.search("/steps/([0-9.]+)/", cause.log or "") if cause else None
            which = f" --rank {cause.rank}" if cause else ""
            steps = [("its log", f"clusterddp logs {address}{which}" + (f" --step {step[1]}" if step else ""))]
    if state in {"FAILED", "LOST", "CANCELLED"}:
        steps.append(_again(run, address, cause))
    elif state == "COMPLETED":
        steps += _further(run, address)
    return [f"  {what:<10} {text}" for what, text in steps]


def _again(run: RunDir, address: str, cause: RankEnd | None) -> tuple[str, str]:
    """Return the command that continues a run that has ended, or repeats it, and whether something has to change."""
    launcher = (read_json(run.record) or {}).get("launcher")
    attempts = run.attempts()
    end = read_end(attempts[-1]) if attempts else None
    # A program that ended because it was asked to has saved by itself.
    goes_on = has_checkpoint(run) or (end is not None and end.has_stopped)
    if launcher in BY_HAND:
        command, where = BY_HAND[launcher]
        command = f"{command} --resume {run.name}, {where}" if goes_on else f"{command}, {where}"
    else:
        command = f"clusterddp {'resume' if goes_on else 'submit'} {address}"
    if cause is not None and not diagnose(cause).may_pass:
        return "once fixed", command
    return ("go on" if goes_on else "try again", command)


def _further(run: RunDir, address: str) -> list[tuple[str, str]]:
    """Return the command that gives a completed run more to do, or starts it once more; none for ranks by hand."""
    plan = read_json(run.plan) or {}
    if str(plan.get("launcher", "local")) in BY_HAND:
        return []
    spec = plan.get("spec")
    if isinstance(spec, dict) and spec.get("train") and has_checkpoint(run):
        return [("go further", f"clusterddp resume {address} train.epochs=N")]
    return [("repeat", f"clusterddp submit {address}")]


def rank_table(ranks: Sequence[RankStatus], columns: int | None) -> list[str]:
    """Lay out ranks, one a line."""

    def column(title: str, facts: Sequence[object], gives_way: int = 0) -> Column:
        cells = ["-" if fact is None else printable(str(fact)) for fact in facts]
        return Column(title=title, cells=cells, gives_way=gives_way)

    owned = any(rank.owns for rank in ranks)
    now = time.time()
    outputs = [rank.last_output and f"{duration(max(0.0, now - rank.last_output))} ago" for rank in ranks]
    masters = [
        f"{rank.master_addr}:{rank.master_port}" if rank.master_addr and rank.master_port else None for rank in ranks
    ]
    nodes = column("NODE", [rank.node_rank for rank in ranks], 0 if owned else 4)
    places = [
        column("RANK", [rank.rank for rank in ranks]),
        nodes,
        column("LOCAL", [rank.local_rank for rank in ranks], 5),
    ]
    if owned:
        places = [nodes, column("ITS RANKS", [rank_span(rank.owns or (rank.rank,)) for rank in ranks])]
    shown = [
        *places,
        column("HOST", [rank.host for rank in ranks], 2),
        column("PID", [rank.pid for rank in ranks], 6),
        Column(title="STATE", cells=[rank.state for rank in ranks], paint=state_text),
        column("EXIT", [rank.exit_code for rank in ranks], 1),
        *_usage_columns([[rank] for rank in ranks]),
        *([column("OUTPUT", outputs, 3)] if any(outputs) else []),
        column("INTERFACE", [rank.interface for rank in ranks], 7),
        column("MASTER", masters, 8),
    ]
    return lay_out(shown, room=columns, indent="  ")


def node_table(ranks: Sequence[RankStatus], columns: int | None) -> list[str]:
    """Lay out nodes, one a line, with the states of their ranks."""
    by_node: dict[int, list[RankStatus]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.node_rank):
        by_node.setdefault(rank.node_rank, []).append(rank)
    spans = [rank_span([each for rank in node for each in rank.owns or (rank.rank,)]) for node in by_node.values()]
    counts = [Counter(rank.state for rank in node).most_common() for node in by_node.values()]
    states = [", ".join(f"{count} {state}" for state, count in of_node) for of_node in counts]

    def paint(cell: str) -> str:
        return re.sub("[A-Z_]+", lambda match: state_text(match[0]), cell)

    shown = [
        Column(title="NODE", cells=[str(number) for number in by_node]),
        Column(title="HOST", cells=[printable(node[0].host) for node in by_node.values()], gives_way=1, least=8),
        Column(title="RANKS", cells=spans),
        Column(title="STATES", cells=states, least=12, paint=paint),
        *_usage_columns(list(by_node.values())),
    ]
    return lay_out(shown, room=columns, indent="  ")


def _usage_columns(groups: Sequence[Sequence[RankStatus]]) -> list[Column]:
    """Lay out what groups of ranks use, and how fast they are, as far as it is known of any of them."""

    def paint(cell: str) -> str:
        return click.style(cell, fg="yellow", bold=True) if cell.endswith("slow") else cell

    texts = [usage_texts(group) for group in groups]
    ways = {"STEP": 3, "MS/STEP": 2, "CPU": 5, "MEMORY": 4, "GPU": 3, "GPU MEMORY": 3}
    columns = [
        Column(title=title, cells=[each[title] for each in texts], gives_way=gives_way, paint=paint)
        for title, gives_way in ways.items()
    ]
    return [each for each in columns if {*each.cells} != {"-"}]


def usage_texts(ranks: Sequence[RankStatus]) -> dict[str, str]:
    """Sum up what ranks use, by the title of its column: their steps, cores, memory, and how busy their GPUs are."""
    known = [rank.usage for rank in ranks if rank.usage]
    cores = [rank.cpu for rank in known if rank.cpu is not None]
    gpus = [rank.gpu for rank in known if rank.gpu is not None]
    memory, gpu_memory = sum(rank.memory or 0 for rank in known), sum(rank.gpu_memory or 0 for rank in known)
    slow = " slow" if any(rank.straggler for rank in ranks) else ""
    return {
        "STEP": _span([rank.step for rank in known if rank.step is not None], "d"),
        "MS/STEP": _span([rank.step_s * 1e3 for rank in known if rank.step_s is not None], ".3g") + slow,
        "CPU": f"{sum(cores):.1f}" if cores else "-",
        "MEMORY": format_bytes(memory) if memory else "-",
        "GPU": f"{sum(gpus) / len(gpus):.0%}" if gpus else "-",
        "GPU MEMORY": format_bytes(gpu_memory) if gpu_memory else "-",
    }


def _span(values: Sequence[float], form: str) -> str:
    """Write the lowest and the highest of some values, once where they are equal."""
    ends = dict.fromkeys(format(value, form) for value in (min(values), max(values))) if values else ["-"]
    return "-".join(ends)
