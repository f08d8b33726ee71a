"""`init --launcher slurm`: the spec that is filled from the cluster, on the rack and for clusters not at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.places.slurm.cluster import Association, Cluster, Partition, User, parse_gpus, read_cluster
from clusterddp.places.slurm.commands import read_duration_s
from clusterddp.places.slurm.first_spec import fill_in
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import plan_run
from clusterddp.spec.load import load_spec
from clusterddp.system.templates import read_template
from tests.support.paths import ROOT
from tests.support.slurm_clusters import CLUSTERS, fake_commands
from tests.testbed.plan import HEAD, USER, RackPlan
from tests.testbed.rack import Rack, running_rack

NAMES = sorted(path.name for path in CLUSTERS.iterdir() if path.is_dir())
INIT = [sys.executable, "-m", "clusterddp", "init", "--launcher", "slurm"]


def init(directory: Path, environ: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INIT, *more], check=False, cwd=directory, env=environ, capture_output=True, text=True, timeout=240
    )


def at(cluster: str, tmp_path: Path) -> dict[str, str]:
    return fake_commands(cluster, tmp_path / "commands") | {"PYTHONPATH": str(ROOT)}


def cluster_at(cluster: str, tmp_path: Path, *groups: str) -> Cluster:
    return read_cluster(fake_commands(cluster, tmp_path / "commands"), user=User(name="ana", groups=groups))


def on_rack(rack: Rack, *arguments: str, user: str = "root", **options: Any) -> subprocess.CompletedProcess[str]:
    return rack.run(
        HEAD,
        [*INIT, *arguments],
        env={"PYTHONPATH": str(ROOT)},
        cwd=rack.dir / "shared",
        user=user,
        check=False,
        **options,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_for_a_cluster_is_the_golden_one(name: str, tmp_path: Path) -> None:
    done = init(tmp_path, at(name, tmp_path))
    assert done.returncode == 0, done.stderr
    if os.environ.get("CLUSTERDDP_WRITE_GOLDEN"):
        (CLUSTERS / name / "job.yaml").write_text((tmp_path / "job.yaml").read_text())
        (CLUSTERS / name / "notes").write_text(done.stderr)
    assert (tmp_path / "job.yaml").read_text() == (CLUSTERS / name / "job.yaml").read_text()
    assert done.stderr == (CLUSTERS / name / "notes").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_spec_reads(name: str) -> None:
    assert load_spec(CLUSTERS / name / "job.yaml", environ={}).job.launcher == "slurm"


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_spec_plans(name: str, tmp_path: Path) -> None:
    resolved = load_spec(CLUSTERS / name / "job.yaml", environ={})
    plan = plan_run(resolved, Request(runs_dir=tmp_path / "runs", working_dir=tmp_path, environ={}))
    assert plan.slurm is not None
    assert f"--partition={resolved.job.slurm['partition']}" in plan.slurm.sbatch


def test_a_default_partition_without_gpus_gives_way_to_one_with_gpus(tmp_path: Path) -> None:
    init(tmp_path, at("mixed_24_05", tmp_path))
    assert load_spec(tmp_path / "job.yaml", environ={}).job.slurm["partition"] == "gpu"


def test_the_partition_can_be_named(tmp_path: Path) -> None:
    init(tmp_path, at("mixed_24_05", tmp_path), "--partition", "cpu")
    job = load_spec(tmp_path / "job.yaml", environ={}).job
    assert (job.slurm["partition"], job.device, job.resources.gpus_per_node) == ("cpu", "cpu", None)


def test_a_partition_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    done = init(tmp_path, at("mixed_24_05", tmp_path), "--partition", "gpus")
    assert (done.returncode, (tmp_path / "job.yaml").exists()) == (2, False)
    assert "--partition gpus: the cluster has cpu, gpu, gpu-long, robots" in done.stderr


def test_a_named_partition_that_takes_no_jobs_is_reported(tmp_path: Path) -> None:
    done = init(tmp_path, at("mixed_24_05", tmp_path), "--partition", "robots")
    assert "partition robots takes none of your jobs now: it takes the accounts robots" in done.stderr


def test_the_time_limit_of_the_account_counts_too(tmp_path: Path) -> None:
    partition = Partition(name="gpu", max_time_s=7 * 86_400)
    cluster = Cluster(associations=(Association(account="teaching", max_wall_s=3_600),))
    time = next(filled for filled in fill_in(cluster, partition) if filled.key == "time")
    assert (time.value, time.why) == ("1:00:00", "account teaching allows 1:00:00")


def test_accounts_of_other_clusters_in_the_same_data_base_are_not_ours(tmp_path: Path) -> None:
    assert cluster_at("mixed_24_05", tmp_path).accounts == ("vision", "teaching")


def test_without_slurm_the_plain_template_is_written_with_a_note(tmp_path: Path) -> None:
    done = init(tmp_path, os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "job.yaml").read_text() == read_template("init_slurm.yaml")
    assert "note: scontrol: no such command here" in done.stderr


def test_a_partition_that_yaml_would_read_as_a_boolean_is_quoted(tmp_path: Path) -> None:
    init(tmp_path, os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}, "--partition", "on")
    assert '  partition: "on" ' in (tmp_path / "job.yaml").read_text()


def test_a_partition_is_for_the_slurm_launcher_only(tmp_path: Path) -> None:
    done = init(tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}, "--launcher", "local", "--partition", "gpu")
    assert (done.returncode, "--partition is for --launcher slurm" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:8", (("", 8),)),
        ("gpu:a100:4(S:0-1)", (("a100", 4),)),
        ("gpu:v100:2(S:0),gpu:t4:1(S:0,1),mps:400", (("v100", 2), ("t4", 1))),
        ("gpu:a100_3g.20gb:4(S:0),shard:16", (("a100_3g.20gb", 4),)),
        ("gpu:2080ti:no_consume:4", (("2080ti", 4),)),
        ("gpu", (("", 1),)),
        ("craynetwork:4", ()),
        ("gpu:a100:0", ()),
    ],
)
def test_gpus_are_read_from_every_form_of_gres(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert parse_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2-00:00:00", 172_800), ("04:00:00", 14_400), ("30:00", 1_800), ("UNLIMITED", None), ("NONE", None), ("", None)],
)
def test_times_are_read_as_slurm_prints_them(text: str, seconds: int | None) -> None:
    assert read_duration_s(text) == seconds


@pytest.mark.root
def test_on_the_rack_the_spec_has_its_partition_gpus_cores_and_memory(rack: Rack) -> None:
    path = rack.dir / "shared" / "filled.yaml"
    assert on_rack(rack, str(path)).returncode == 0
    job = load_spec(path, environ={}).job
    assert (job.slurm, job.restarts) == ({"partition": "low"}, 1)
    assert (job.resources.gpus_per_node, job.resources.cpus_per_task, job.resources.memory_gb) == (8, 4, 225)


@pytest.mark.root
def test_on_the_rack_the_notes_explain_the_settings_of_the_cluster(rack: Rack) -> None:
    said = on_rack(rack, "said.yaml").stderr
    for words in ("no accounting", "KillWait, 5 s"):
        assert words in said
    assert "JobRequeue" not in said


@pytest.mark.root
def test_the_only_account_is_filled_in(needs_rack_accounting: None) -> None:
    with running_rack(RackPlan(nodes=["node1"], accounting=True)) as rack:
        rack.run(HEAD, ["sacctmgr", "-i", "add", "account", "vision"])
        rack.run(HEAD, ["sacctmgr", "-i", "add", "user", USER, "account=vision"])
        script = (
            "import os; from clusterddp.places.slurm.cluster import User, read_cluster; "
            f"cluster = read_cluster(os.environ, user=User(name={USER!r})); "
            "print(cluster.accounts, cluster.has_accounting, cluster.unanswered)"
        )
        seen = rack.run(HEAD, [sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT)}).stdout
        assert seen == "('vision',) True ()\n"
