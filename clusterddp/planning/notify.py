"""The messages of a spec's `notify` in a plan: taken from the spec, sealed, and read again to be sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from clusterddp.planning.seal import is_sealed, seal
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Notify
from clusterddp.system.files import build_record, read_json

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

_SEALED = "the messages of a plan"


def notify_of(job: JobSpec) -> Notify | None:
    """Return the messages that clusterddp sends itself; on Slurm sbatch's options send the mail."""
    spec = job.notify
    if spec is None:
        return None
    mail = None if job.launcher == "slurm" else spec.mail
    # The paths of the command are absolute already.
    notify = Notify(on=tuple(dict.fromkeys(spec.on)), command=spec.argv(Path("/")), webhook=spec.webhook, mail=mail)
    return notify if notify.channels else None


def masked(webhook: str) -> str:
    """Return the address of a webhook as it may be shown: without its path, which is often a secret."""
    url = urlsplit(webhook)
    return webhook if webhook.startswith("${") else f"{url.scheme}://{url.hostname}/..."


def notify_notes(job: JobSpec) -> tuple[str, ...]:
    """Warn of an address in the spec, and of a mail that Slurm does not send."""
    spec = job.notify
    if spec is None:
        return ()
    notes = []
    if spec.webhook and not spec.secret:
        notes.append(
            "notify.webhook: the run's files keep the address; if it is a secret, ${NAME} takes it from a variable of "
            "your environment"
        )
    if spec.mail and job.launcher == "slurm" and "hang" in spec.on:
        notes.append("notify.mail: Slurm sends the mail, and knows no hang")
    return tuple(notes)


def notify_seal(data: dict[str, Any]) -> dict[str, str]:
    """Return the seal of the messages in the JSON of a plan, as a part of it; empty where there are none."""
    return {"notify_seal": seal(_SEALED, _granted(data))} if data["gang"].get("notify") else {}


def read_notify(run: RunDir) -> Notify | None:
    """Read the messages of a run that this user's clusterddp may send; None: there are none, or not from this user.

    Raises: ClusterddpError, OSError: the plan or the key of the seal cannot be read.
    """
    data: Any = read_json(run.plan)
    if not isinstance(data, dict) or not isinstance(data.get("gang"), dict):
        return None
    gang = data["gang"]
    if not gang.get("notify") or "token" not in gang or run.plan.stat().st_uid != os.geteuid():
        return None
    if not is_sealed(_SEALED, _granted(data), data.get("notify_seal")):
        return None
    return build_record(Notify, gang["notify"], str(run.plan))


def _granted(data: dict[str, Any]) -> list[Any]:
    return [data["gang"]["token"], data["gang"]["notify"]]
