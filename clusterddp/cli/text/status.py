"""Show a run as text: its state, progress and ranks, why it failed, and the next commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from clusterddp.cli.terminal import duration, wrapped
from clusterddp.cli.text.next_steps import next_steps
from clusterddp.cli.text.rank_table import node_table, rank_table
from clusterddp.cli.text.states import WITHOUT_REASON, state_text
from clusterddp.look.printable import printable
from clusterddp.run.record import FOREIGN
from clusterddp.system.units import format_count

if TYPE_CHECKING:
    from clusterddp.look.checkpoints import Checkpoint
    from clusterddp.look.events import NodeTransport, Stopping
    from clusterddp.look.progress import Progress
    from clusterddp.look.status import RunStatus
    from clusterddp.look.timeline import Times
    from clusterddp.run.directory import RunDir
    from clusterddp.run.outcome import RootCause
    from clusterddp.slurm.jobs import Job

MOST_RANKS_ONE_BY_ONE = 8
_MOST_VALUES_SHOWN = 4
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_FEWEST_BARS = 4


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
    lines = [f"{name}  {state_text(state)}  {where}"]
    if status.stopping:
        lines.append(f"  {printable(stopping_text(status.stopping, now=time.time()))}")
    if status.reason and not status.root_cause and status.state.value not in WITHOUT_REASON:
        lines.append(f"  {printable(status.reason)}")
    if status.warning:
        lines.append(f"  {warning_text(status.warning)}")
    said = lines[1:]
    lines += [f"  {printable(text)}" for text in status.unreachable if not any(text in line for line in said)]
    lines += _progress_lines(status, address)
    if status.start_phases:
        lines.append(f"  start: {phases_text(status.start_phases)}")
    lines += [f"  NCCL: {printable(text)}" for text in transport_texts(status.transports)]
    if status.lost_rows:
        lines.append(f"  metrics.jsonl lacks {status.lost_rows} rows, which its storage did not take")
    lines = [each for line in lines for each in wrapped(line, columns, indent=4)]
    lines += [f"  {printable(str(run.path))}"]
    if status.report:
        lines.append(f"  report: {printable(status.report)}")
    if status.checkpoint:
        lines.append(f"  {checkpoint_text(status.checkpoint)}")
    lines.append("")
    if one_by_one or len(status.ranks) <= MOST_RANKS_ONE_BY_ONE:
        lines += rank_table(status.ranks, columns)
    else:
        lines += node_table(status.ranks, columns)
    if status.root_cause:
        lines += ["", *root_cause_lines(status.root_cause, run, columns=columns)]
    steps = next_steps(status.state.value, address, run, status.root_cause, job_log=status.job_log)
    return [*lines, "", *steps] if steps else lines


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
    if len(values) < _FEWEST_BARS or not _shows(_BARS):
        return ""
    low, span = min(values), max(values) - min(values)
    bars = (_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in values)
    return f"{''.join(bars)} {values[0]:.4g} to {values[-1]:.4g}"


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def stopping_text(stopping: Stopping, *, now: float) -> str:
    """Say why the ranks are to stop, how long they have left, and whether their program knows."""
    left = f"{stopping.reason}: its ranks are ended in {duration(max(0.0, stopping.until - now))}"
    if stopping.asks:
        return f"{left} if they have not stopped at a checkpoint by then"
    return f"{left} and save nothing: the program has not asked clusterddp.should_stop()"


def checkpoint_text(checkpoint: Checkpoint) -> str:
    """Write where the newest checkpoint lies, and after which step it was written."""
    where = f" on {printable(checkpoint.host)}" if checkpoint.host else ""
    return f"checkpoint{where}: {printable(checkpoint.path)}, step {checkpoint.step}"


def root_cause_lines(cause: RootCause, run: RunDir, *, columns: int | None = None) -> list[str]:
    """Write why the run failed: the first failure, and the last lines of that rank's standard error."""
    from clusterddp.look.diagnosis import diagnose
    from clusterddp.look.log_file import read_log_tail

    known = cause.exit_code is None or f"exit code {cause.exit_code}" in cause.error
    code = "" if known else f"  (exit code {cause.exit_code})"
    what = f"{click.style('root cause:', fg='red', bold=True)} {printable(cause.error)}{code}"
    kind = diagnose(cause)
    lines = wrapped(what, columns, indent=2)
    lines += wrapped("; ".join(filter(None, [f"  category: {kind.text}", kind.hint])), columns, indent=4)
    tail = _from_traceback(read_log_tail(run.path / cause.log)) if cause.log else []
    if not tail and cause.traceback:
        tail = [printable(line) for line in cause.traceback.rstrip().split("\n")[-10:]]
    if tail:
        if cause.log:
            lines.append(f"  the end of {run.path / cause.log}:")
        lines += [f"  | {line}" for line in tail]
    return lines


def _from_traceback(lines: list[str]) -> list[str]:
    """Return the lines from the last traceback on, or all when there is none."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return lines[starts[-1] :] if starts else lines


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


def phases_text(phases: Mapping[str, float]) -> str:
    """Write in one line how long each phase of a start took."""
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in phases.items())


def transport_texts(transports: Sequence[NodeTransport]) -> list[str]:
    """Write by which network and devices NCCL sends, equal nodes together."""
    nodes: dict[str, list[str]] = {}
    for transport in transports:
        devices = f" ({', '.join(transport.devices)})" if transport.devices else ""
        links = f", by {', '.join(transport.links)}" if transport.links else ""
        nodes.setdefault(f"network {transport.network}{devices}{links}", []).append(transport.host)
    if len(nodes) == 1:
        return list(nodes)
    return [f"{', '.join(dict.fromkeys(hosts))}: {text}" for text, hosts in nodes.items()]


def measures(progress: Progress) -> list[str]:
    """Write loss, accuracy and speed, as far as they are known."""
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.accuracy is not None:
        parts.append(f"accuracy {progress.accuracy:.1%}")
    if progress.images_per_s is not None:
        parts.append(f"{_count(progress.images_per_s)} images/s")
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
    if status.launcher == FOREIGN:
        parts = [f"started by {status.job_id}"]
    if status.job:
        parts += _job_facts(status.job)
    running = sum(rank.state == "RUNNING" for rank in status.ranks)
    count = format_count(status.world_size, "rank")
    if status.ranks and status.ranks[0].owns is not None:
        programs = format_count(len(status.ranks), "program")
        parts.append(f"{running} of {programs} running" if status.state.value == "RUNNING" else programs)
        parts.append(f"{count} of their own")
    else:
        parts.append(f"{running} of {count} running" if status.state.value == "RUNNING" else count)
    if status.attempt:
        parts.append(f"attempt {status.attempt}")
    return ", ".join([*parts, *times_texts(status.times)])


def times_texts(times: Times) -> list[str]:
    """Write how long a run ran, waited and stood still, as far as it did."""
    spent = (("ran", times.running_s), ("queued", times.queued_s), ("stopped", times.stopped_s))
    return [f"{what} {duration(seconds)}" for what, seconds in spent if seconds >= 1]


def _job_facts(job: Job) -> list[str]:
    """Write Slurm's state of the job when it adds to the run's, and the job's nodes."""
    parts = [] if job.state in {"PENDING", "RUNNING"} else [job.state]
    if job.nodes:
        parts.append(f"on {printable(job.nodes)}")
    elif job.num_nodes:
        parts.append(format_count(job.num_nodes, "node"))
    return [*parts, f"partition {printable(job.partition)}"] if job.partition else parts


def _count(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"
