"""Name the commands that are useful next, by the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterddp.look.checkpoints import has_checkpoint
from clusterddp.run.outcome import read_end
from clusterddp.run.record import FOREIGN
from clusterddp.system.files import read_json

if TYPE_CHECKING:
    from clusterddp.run.directory import RunDir
    from clusterddp.run.outcome import RootCause

_BY_HAND = {
    "join": ("clusterddp join SPEC", "on each machine"),
    FOREIGN: ("clusterddp worker SPEC", "started as before"),
}


def next_steps(
    state: str, address: str, run: RunDir, cause: RootCause | None, *, job_log: str | None = None
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
            steps = [("its log", f"clusterddp logs {address}" + (f" --rank {cause.rank}" if cause else ""))]
    if state in {"FAILED", "LOST", "CANCELLED"}:
        steps.append(_again(run, address))
    elif state == "COMPLETED":
        steps += _further(run, address)
    return [f"  {what:<10} {text}" for what, text in steps]


def _again(run: RunDir, address: str) -> tuple[str, str]:
    """Return the command that continues a run that has ended, or repeats it."""
    launcher = (read_json(run.record) or {}).get("launcher")
    goes_on = has_checkpoint(run) or _stopped_by_itself(run)
    if launcher in _BY_HAND:
        command, where = _BY_HAND[launcher]
        command = f"{command} --resume {run.name}, {where}" if goes_on else f"{command}, {where}"
    else:
        command = f"clusterddp {'resume' if goes_on else 'submit'} {address}"
    return ("go on" if goes_on else "try again", command)


def _stopped_by_itself(run: RunDir) -> bool:
    """Return whether its program ended because it was asked to: it has saved by itself."""
    attempts = run.attempts()
    end = read_end(attempts[-1]) if attempts else None
    return end is not None and end.outcome == "STOPPED" and not end.warning


def _further(run: RunDir, address: str) -> list[tuple[str, str]]:
    """Return the command that gives a completed run more to do, or starts it once more; none for ranks by hand."""
    plan = read_json(run.plan) or {}
    if plan.get("launcher", "local") in _BY_HAND:
        return []
    if plan.get("spec", {}).get("train") and has_checkpoint(run):
        return [("go further", f"clusterddp resume {address} train.epochs=N")]
    return [("repeat", f"clusterddp submit {address}")]
