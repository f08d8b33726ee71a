"""What `submit -n` prints: one screen by default, all of the plan with -v."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.planning.plan import ADJECTIVES, ANIMALS
from tests.support.paths import JOBS, ROOT

SCRIPT = "name: mine\nlauncher: {launcher}\nentry:\n  script: train.py\n  args: [--lr, '0.1']\n"
RUN_NAME = re.compile(rf"\b({'|'.join(ADJECTIVES)})-({'|'.join(ANIMALS)})-\d+")

ONE_RUN = sorted(path for path in JOBS.rglob("*.yaml") if "sweep" not in path.stem)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(SCRIPT.format(launcher="local"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command but git be found."""
    git = shutil.which("git")
    assert git
    (tmp_path / ".bin").mkdir()
    (tmp_path / ".bin" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / ".bin"))


def dry_run(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["submit", *arguments, "-n"]) == 0
    return capfd.readouterr().out.splitlines()


def fact(lines: list[str], name: str) -> str:
    """Return a fact of the plan, its lines joined."""
    text = "\n".join(lines)
    found = re.search(rf"^  {name} +(.*(?:\n {{12}}.*)*)", text, re.MULTILINE)
    assert found, f"{name} is not in\n{text}"
    return " ".join(found[1].split())


def test_the_plan_of_a_script_fits_a_screen(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capfd, "job.yaml", "resources.nodes=2", "env.SEED=7")
    assert len(lines) <= 16
    assert max(len(line) for line in lines if "/" not in line) <= 80
    assert lines[0].startswith("plan for mine ")
    assert fact(lines, "runs") == "train.py --lr 0.1"
    assert fact(lines, "where") == "local: this machine"
    assert fact(lines, "ranks").startswith("2 nodes x 1 = 2 ranks, on the CPU")
    assert fact(lines, "network") == "gloo over lo; master 127.0.0.1, a free port"
    assert fact(lines, "code") == f"snapshot of {place}: 2 files, 0.1 KiB"
    assert fact(lines, "output") == "runs/RUN: logs; {output_dir} is runs/RUN/output"
    assert fact(lines, "changed") == "resources.nodes=2, env.SEED=7"


@pytest.mark.parametrize("job", ONE_RUN, ids=lambda path: path.stem)
def test_the_plan_of_every_job_fits_a_screen(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    asks_for_gpus = not re.search("launcher: (slurm|ssh)", job.read_text())
    lines = dry_run(capfd, str(job.relative_to(ROOT)), *(["--cpu"] if asks_for_gpus else []))
    assert len(lines) <= 24, "\n".join(lines)
    assert not [line for line in lines if len(line) > 80 and "/" not in line]


def test_the_plan_invents_no_name(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["-v"], ["-o", "json"], ["-v", "env.SEED=1,2", "--sweep"], ["--hosts", "a,b", "-v"]):
        text = "\n".join(dry_run(capfd, "job.yaml", *arguments))
        assert not RUN_NAME.search(text)
        assert "runs/RUN" in text


def test_a_verbose_plan_has_variables_files_and_commands(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short, long = dry_run(capfd, "job.yaml"), dry_run(capfd, "job.yaml", "-v")
    for words in ("variables of rank 0", "WORLD_SIZE", "files", "commands", "entry.args", "job.yaml:5"):
        assert words in "\n".join(long)
    for words in ("variables of rank 0", "WORLD_SIZE", "commands\n"):
        assert words not in "\n".join(short)
    assert "-v shows" in short[0]


def test_the_plan_of_a_training_names_its_data_and_its_time(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "job.yaml").write_text(
        "name: t\nresources: {procs_per_node: 2}\ntrain: {dataset: cifar10, data_dir: data}\n"
    )
    lines = dry_run(capfd, "job.yaml", "resources.time=1:30:00", "--cpu")
    assert fact(lines, "trains") == "resnet18 on cifar10, 10 epochs, batch 128 per rank = 256 in all"
    assert fact(lines, "time") == "1h 30m; asked to stop 2m 00s before"
    assert fact(lines, "data") == "data"


def test_a_time_without_a_unit_is_shown_in_minutes(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    times = ("hang_after=10", "stop.grace=0:30", "network.start_timeout=20", "restarts=1")
    lines = dry_run(capfd, "job.yaml", *times)
    shown = "hang_after=10 min, stop.grace=0:30, network.start_timeout=20 min, restarts=1"
    assert sorted(fact(lines, "changed").split(", ")) == sorted(shown.split(", "))
    verbose = "\n".join(dry_run(capfd, "job.yaml", *times, "-v"))
    assert re.search(r"hang_after +10 min ", verbose)
    assert fact(dry_run(capfd, "job.yaml", "--launcher", "slurm", "resources.time=90"), "time").startswith("90 min; ")


def test_changed_values_that_do_not_fit_are_counted(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capfd, "job.yaml", *(f"env.VARIABLE_{number}=something-{number}" for number in range(40)))
    assert fact(lines, "changed").startswith("env.VARIABLE_0=something-0, ")
    assert re.search(r", and 3\d more$", fact(lines, "changed"))
    assert len(lines) <= 20


def test_hosts_and_what_is_sent_are_in_the_plan(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capfd, "job.yaml", "--hosts", "a,b,c,d,e")
    assert fact(lines, "where") == "ssh: a, b, c and 2 more"
    assert fact(lines, "sends") == "the code to each host, without what is there already"
    assert fact(lines, "output").endswith(
        "on the hosts; copied to runs/RUN: logs, metrics, checkpoints, the first host's output/"
    )


def test_the_plan_as_json_is_complete(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = json.loads("\n".join(dry_run(capfd, "job.yaml", "-o", "json")))
    assert plan["rank0"]["WORLD_SIZE"]["value"] == "1"
    assert plan["files"]
    assert plan["commands"]


def test_the_plan_names_the_files_that_gave_values(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shared = place / "clusterddp.yaml"
    shared.write_text("env: {A: b}\nresources: {nodes: 2}\nruns_dir: ../kept\n")
    shared.chmod(0o644)
    assert "values" not in [line[2:8] for line in dry_run(capfd, "job.yaml", "env.A=c", "resources.nodes=3")]
    lines = dry_run(capfd, "job.yaml")
    assert fact(lines, "values") == "2 from clusterddp.yaml"
    assert str(place.parent / "kept" / "RUN") in fact(lines, "output")
    assert any(line.split() == ["env.A", "b", "null", "clusterddp.yaml:1"] for line in dry_run(capfd, "job.yaml", "-v"))
    changes = json.loads("\n".join(dry_run(capfd, "job.yaml", "-o", "json")))["changes"]
    assert {change["key"] for change in changes if change["file"]} == {"env.A", "resources.nodes"}


def test_a_project_file_that_cannot_be_used_leaves_the_runs_directory_unknown(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "clusterddp.yaml").touch()
    (place / "clusterddp.yaml").chmod(0o666)
    assert main(["list"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(
        "error: clusterddp.yaml has 1 problem, so the runs directory is not known: --runs DIR names it"
    )
    assert main(["list", "--runs", str(place / "runs")]) == 0
