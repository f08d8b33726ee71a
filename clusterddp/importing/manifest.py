"""A spec as a PyTorchJob of Kubeflow: the manifest for `kubectl apply`, from the template."""

from __future__ import annotations

import json
import re
from string import Template
from typing import TYPE_CHECKING

from clusterddp.errors import UsageError
from clusterddp.planning.slurm import memory_text
from clusterddp.system.templates import read_template

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

RUNS = "/runs"
_WORKERS = """\
    Worker:
      replicas: {count}
      restartPolicy: {restart}
      template: *pod"""


def write_manifest(job: JobSpec, text: str, *, image: str, workdir: str, claim: str | None) -> str:
    """Write the manifest of a run of the spec with this text: one pod for each node.

    `claim`: the volume claim for the runs; None: they are removed with the pods.
    Raises: UsageError: the spec is a sweep.
    """
    if job.sweep:
        raise UsageError("a spec with a sweep is many runs; a manifest is about one", hint="~sweep drops the section")
    resources = job.resources
    limits: dict[str, object] = {}
    if resources.cpus_per_task:
        limits["cpu"] = resources.cpus_per_task * resources.ranks_per_node
    if resources.memory_gb:
        limits["memory"] = f"{memory_text(resources.memory_gb)}i"
    if resources.gpus_per_node and job.device != "cpu":
        limits["nvidia.com/gpu"] = resources.gpus_per_node
    # The values of secrets are in a Secret of the cluster, the spec's env is in the spec.
    key = f"valueFrom: {{secretKeyRef: {{name: {_object_name(job.name)}, key: "
    secrets = [f"                - {{name: {name}, {key}{name}}}}}}}" for name in job.all_secrets]
    runs = f"              - {{name: runs, mountPath: {RUNS}}}"
    volume = f"            - name: runs\n              persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}"
    restart = "OnFailure" if job.restarts else "Never"
    filled = Template(read_template("kubeflow_pytorchjob.yaml")).substitute(
        name=_object_name(job.name),
        spec="\n".join(f"    {line}".rstrip() for line in text.splitlines()),
        ranks_per_node=resources.ranks_per_node,
        restarts=job.restarts,
        restart=restart,
        deadline=f"    activeDeadlineSeconds: {resources.time.seconds}" if resources.time else "",
        image=json.dumps(image),
        workdir=json.dumps(workdir),
        env="\n".join(["              env:", *secrets]) if secrets else "",
        limits=json.dumps(limits),
        runs=RUNS if claim else "/tmp/runs",  # noqa: S108
        runs_mount=f"  {runs}" if claim else "",
        runs_volume=volume if claim else "",
        workers=_WORKERS.format(count=resources.nodes - 1, restart=restart) if resources.nodes > 1 else "",
    )
    return "\n".join(line for line in filled.splitlines() if line.strip()) + "\n"


def _object_name(name: str) -> str:
    """Make a valid name of a Kubernetes object; Kubernetes appends to it, up to 63 characters."""
    return re.sub("[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].strip("-") or "job"
