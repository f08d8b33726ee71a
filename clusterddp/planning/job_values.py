"""The spec's values in a plan: absolute paths, every default filled in, timeouts, the spec as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from clusterddp.run.gang import Notify
from clusterddp.spec.image_sets import GENERATED
from clusterddp.system.timeouts import HEARTBEAT_TIMEOUT_S, HOST_SILENCE_S

if TYPE_CHECKING:
    from clusterddp.spec.entry_section import EntrySpec
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.model import JobSpec

_START_S = 60.0
_START_ON_SLURM_S = 600.0
"""Long, because nodes may boot and pull container images."""
_START_S_PER_NODE = 1.0
"""Supervisors start some tens at a time, and many share a network or, as virtual machines, a processor."""
_STOP_S = 120.0
_STOP_LEAD_S = 60.0
"""The default of stop.lead for a spec without a time limit."""


def with_absolute_paths(job: JobSpec, working_dir: Path) -> JobSpec:
    """Make local paths absolute, because ranks and `submit RUN` read the spec elsewhere; paths on hosts stay."""
    if job.notify and job.notify.command:
        command = job.notify.argv(working_dir)
        job = job.model_copy(update={"notify": job.notify.model_copy(update={"command": command})})
    if job.ssh.send:
        send = {str(working_dir / Path(source).expanduser()): target for source, target in job.ssh.send.items()}
        job = job.model_copy(update={"ssh": job.ssh.model_copy(update={"send": send})})
    if job.launcher == "ssh" and not (job.snapshot and job.entry):
        return job
    if job.train and job.train.data_dir:
        data_dir = str(working_dir / Path(job.train.data_dir).expanduser())
        return job.model_copy(update={"train": dataclasses.replace(job.train, data_dir=data_dir)})
    if job.entry:
        paths = _entry_paths(job.entry, working_dir, on_hosts=job.launcher == "ssh")
        return job.model_copy(update={"entry": job.entry.model_copy(update=paths)})
    return job


def _entry_paths(entry: EntrySpec, working_dir: Path, *, on_hosts: bool) -> dict[str, str]:
    """Make the paths of an entry absolute; `on_hosts`: paths of its data and results are on hosts and stay."""
    here = ("script",) if on_hosts else ("script", "data_dir", "output_dir")
    named = {name: getattr(entry, name) for name in here if getattr(entry, name)}
    paths = {name: str(working_dir / Path(path).expanduser()) for name, path in named.items()}
    file, _, function = (entry.function or "").rpartition(":")
    if file.endswith(".py"):
        paths["function"] = f"{working_dir / Path(file).expanduser()}:{function}"
    return paths


def filled_in(job: JobSpec) -> dict[str, Any]:
    """Return the spec as JSON with every default filled in, for the ranks."""
    data: dict[str, Any] = job.model_dump(mode="json")
    if data["train"] is not None and data["train"]["data_dir"] is None:
        here = str(platformdirs.user_cache_path("clusterddp") / "datasets")
        data["train"]["data_dir"] = f"{job.ssh.dir}/datasets" if job.launcher == "ssh" else here
    return data


def timeouts_of(job: JobSpec, num_nodes: int) -> dict[str, float]:
    """Return the timeouts of a gang, by the names of its fields."""
    network, stop = job.network, job.stop
    limit_s = float(job.resources.time.seconds) if job.resources.time else None
    lead_s = min(_STOP_S, limit_s / 3) if limit_s else _STOP_LEAD_S
    start_s = (_START_ON_SLURM_S if job.launcher == "slurm" else _START_S) + _START_S_PER_NODE * num_nodes
    host_silence_s = float(network.host_silence.seconds) if network.host_silence else HOST_SILENCE_S
    heartbeat_s = network.heartbeat_timeout.seconds if network.heartbeat_timeout else HEARTBEAT_TIMEOUT_S
    return {
        "start_timeout_s": float(network.start_timeout.seconds) if network.start_timeout else start_s,
        "host_silence_s": host_silence_s,
        "heartbeat_timeout_s": max(float(heartbeat_s), host_silence_s),
        "stop_lead_s": float(stop.lead.seconds) if stop.lead else lead_s,
        "stop_grace_s": float(stop.grace.seconds) if stop.grace else _STOP_S,
    }


def directories_used(filled: dict[str, Any], working_dir: Path) -> tuple[str, ...]:
    """Return the directories that a spec uses, which a container has to mount; `filled`: from `filled_in`."""
    section = filled["train"] or filled["entry"] or {}
    data_dir = None if section.get("dataset") in GENERATED else section.get("data_dir")
    named = (data_dir, section.get("output_dir"))
    return tuple(dict.fromkeys([str(working_dir), *(path for path in named if path)]))


def spec_text(job: JobSpec) -> str:
    """Return the spec as YAML; reading it gives the same spec again."""
    from clusterddp.spec.load import resolved_yaml

    return resolved_yaml(job)


def changes_of(resolved: ResolvedSpec) -> tuple[dict[str, Any], ...]:
    """Return the values that differ from their defaults, as they may be shown."""
    return tuple(dataclasses.asdict(change) for change in resolved.changes())


def notify_of(job: JobSpec) -> Notify | None:
    """Return the messages that clusterddp sends itself; on Slurm sbatch's options send the mail."""
    spec = job.notify
    if spec is None:
        return None
    mail = None if job.launcher == "slurm" else spec.mail
    # The path of the command is absolute already.
    notify = Notify(on=tuple(dict.fromkeys(spec.on)), command=spec.argv(Path("/")), webhook=spec.webhook, mail=mail)
    return notify if notify.channels else None
