"""A spec as a PyTorchJob of Kubeflow's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import yaml

from clusterddp.importing.manifest import write_manifest
from clusterddp.spec.load import load_spec
from clusterddp.spec.yamlfile import resolved_yaml
from tests.support.paths import GOLDEN

SPEC = (GOLDEN / "kubeflow_job.yaml").read_text()


def written(text: str, claim: str | None = None) -> list[dict[str, Any]]:
    job = load_spec(text, environ={}).job
    manifest = write_manifest(job, resolved_yaml(job), image="reg/x:1", workdir="/workspace", claim=claim)
    return list(yaml.safe_load_all(manifest))


def test_the_manifest_is_the_golden_one() -> None:
    command = [sys.executable, "-m", "clusterddp", "manifest", str(GOLDEN / "kubeflow_job.yaml")]
    done = subprocess.run(
        [*command, "--image", "reg/x:1", "--claim", "runs"], capture_output=True, text=True, check=True
    )
    golden = GOLDEN / "kubeflow_pytorchjob.yaml"
    # The spec in it names every key that there is, with its default: only ours of it count here.
    assert _without_spec(done.stdout) == _without_spec(golden.read_text())


def test_the_spec_in_it_is_the_one_that_was_given() -> None:
    job = load_spec(SPEC, environ={}).job
    assert load_spec(written(SPEC)[0]["data"]["job.yaml"], environ={}).job == job


def test_there_is_a_pod_for_each_node_with_what_its_ranks_need() -> None:
    spec = written(SPEC)[1]["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert (spec["nprocPerNode"], replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == ("4", 1, 2)
    limits = replicas["Worker"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": 32, "memory": "64Gi", "nvidia.com/gpu": 4}


def test_one_node_has_a_master_alone_and_no_restarts_mean_never() -> None:
    replicas = written("name: a\nentry: {script: t.py}\n")[1]["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master"]
    assert replicas["Master"]["restartPolicy"] == "Never"


def _without_spec(text: str) -> str:
    return text[text.index("---") :]
