"""A run that is not the user's own is data: it is shown, and nothing of it is started, asked, ended or followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import clusterddp
from clusterddp.cli.login import SentRun, find_sent_run, write_sent_run
from clusterddp.cli.main import cli, main
from clusterddp.errors import RunNotFoundError, UsageError
from clusterddp.places.staging import make_run
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import log_event
from clusterddp.run.sweep import find_sweep
from clusterddp.system.files import read_json, write_json
from tests.support.handmade_runs import fail, start_attempt
from tests.support.launch_runs import plan_text

SPEC = """name: mine
entry: {command: "touch PLACE/pwned"}
resources: {nodes: 1, procs_per_node: 2, gpus_per_node: 0}
secrets: [GITHUB_TOKEN]
notify: {command: [touch, PLACE/pwned]}
"""
SSH = "launcher: ssh\nssh: {hosts: [gpu01]}\nsnapshot: false\n"
LAUNCHERS = {"local": "", "ssh": SSH, "slurm": "launcher: slurm\n", "worker": ""}
ACTING = ("ssh", "sbatch", "scancel", "srun", "scontrol")
REFUSED = "is unsealed, so nothing of it is started, asked or ended"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which a user works, whose ssh and Slurm only write down that they were called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in (*ACTING, "squeue", "sacct", "sinfo"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\nexit 1\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("GITHUB_TOKEN", "hunter2")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(place: Path, name: str, launcher: str = "local", *, own: bool, created_ns: int | None = None) -> RunDir:
    """Make a run that its user has submitted, or another one; it waits for its ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setenv("XDG_STATE_HOME", str(place / "anothers"))
        spec = SPEC.replace("PLACE", str(place)) + LAUNCHERS[launcher]
        plan = plan_text(spec, place, environ=dict(os.environ), run=name)
        run = RunDir(make_run(plan, dict(os.environ)).run_dir)
    record = read_json(run.record)
    assert isinstance(record, dict)
    changes = {"created_ns": created_ns} if created_ns is not None else {}
    write_json(run.record, record | changes | ({"launcher": "worker"} if launcher == "worker" else {}))
    return run


def ended(run: RunDir) -> RunDir:
    fail(running(run).attempts()[-1])
    return run


def running(run: RunDir) -> RunDir:
    run.attempt(0).path.rename(run.path / "made")
    start_attempt(run)
    return run


def acts(place: Path) -> list[str]:
    """Return what was started by a command: of ssh and Slurm, and of the run's own program."""
    calls = (place / "calls").read_text().splitlines() if (place / "calls").exists() else []
    return [*(call for call in calls if call.startswith(ACTING)), *map(str, place.glob("pwned"))]


def command(capfd: pytest.CaptureFixture[str], line: str) -> tuple[int, str]:
    capfd.readouterr()
    code = main(line.split())
    return code, "".join(capfd.readouterr())


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("line", ["resume {}", "resume {} --from-start", "resume {} restarts=1", "gc {} --yes"])
def test_nothing_of_a_run_without_the_users_seal_is_started(
    place: Path, capfd: pytest.CaptureFixture[str], launcher: str, line: str
) -> None:
    run = ended(make(place, "nice-run-1", launcher, own=False))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    code, said = command(capfd, line.format("nice-run-1"))
    assert (code, REFUSED in said, "resume nice-run-1 --trust shows what it starts" in said) == (2, True, True), said
    assert acts(place) == []
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


@pytest.mark.parametrize("launcher", ["local", "ssh", "worker"])
@pytest.mark.parametrize("line", ["cancel {}", "cancel --save {}", "exec {} -- true", "stacks {}"])
def test_nothing_of_a_running_run_without_the_users_seal_is_asked_or_ended(
    place: Path, capfd: pytest.CaptureFixture[str], launcher: str, line: str
) -> None:
    run = running(make(place, "nice-run-1", launcher, own=False))
    code, said = command(capfd, line.format("nice-run-1"))
    assert (code != 0, "unsealed" in said or "it is UNKNOWN" in said) == (True, True), said
    assert acts(place) == []
    assert not run.cancel_file.exists()
    assert [path.name for path in run.attempt(0).path.iterdir() if path.name.isupper()] == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_without_the_users_seal_is_shown_and_marked(
    place: Path, capfd: pytest.CaptureFixture[str], launcher: str
) -> None:
    run = ended(make(place, "nice-run-1", launcher, own=False))
    own = ended(make(place, "calm-fox-1", own=True))
    assert "nice-run-1" in command(capfd, "list")[1]
    rows = {row["run"]: row["mark"] for row in json.loads(command(capfd, "list -o json")[1].partition("\nnote")[0])}
    assert rows == {"nice-run-1": "unsealed", "calm-fox-1": ""}
    code, said = command(capfd, "status nice-run-1")
    assert (code, "unsealed" in said.splitlines()[0] + said.splitlines()[1]) == (0, True), said
    assert "the loss is nan" in said
    assert "unsealed" not in command(capfd, "status calm-fox-1")[1]
    assert "the loss is nan" in command(capfd, "logs nice-run-1 --rank 1")[1]
    assert "<title>nice-run-1" in command(capfd, "report nice-run-1 --out -")[1]
    assert command(capfd, "report nice-run-1")[0] == 0
    assert ((place / "report.html").exists(), run.report.exists()) == (True, False)
    assert command(capfd, "compare nice-run-1 calm-fox-1")[0] == 0
    assert command(capfd, "wait nice-run-1")[0] == 5
    assert not (run.path / "notices").exists()
    assert acts(place) == []
    assert own.path.exists()


def test_another_users_run_is_named_so(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    run = ended(make(place, "nice-run-1", own=True))
    os.chown(run.path, 65534, 65534)
    assert "another user's" in command(capfd, "status nice-run-1")[1]
    code, said = command(capfd, "resume nice-run-1")
    assert (code, "belongs to another user" in said) == (2, True)
    assert "resume nice-run-1 --trust" not in said
    assert command(capfd, "resume nice-run-1 --trust")[0] == 2


def test_the_name_of_a_spec_and_the_last_run_are_ones_own(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended(make(place, "calm-fox-1", own=True))
    running(make(place, "nice-run-1", own=False, created_ns=1 << 62))
    runs_dir = place / "runs"
    assert find_run(runs_dir, "mine").name == "calm-fox-1"
    assert find_run(runs_dir, "@last").name == "calm-fox-1"
    assert find_run(runs_dir, "nice-run-1").name == "nice-run-1"
    assert find_sweep(runs_dir, "mine") is None
    assert command(capfd, "status")[1].startswith("calm-fox-1")
    write_sent_run(runs_dir, SentRun(run="far-1", profile="hpc", secrets=("KEY",), created_ns=1 << 61))
    found = find_sent_run(runs_dir, "@last")
    assert (found and found.run) == "far-1"


def test_where_no_run_is_ones_own_the_last_one_is_none(place: Path) -> None:
    ended(make(place, "nice-run-1", own=False))
    with pytest.raises(RunNotFoundError, match=r"no run in .* is your own"):
        find_run(place / "runs", "@last")


def completed(incomplete: str) -> list[str]:
    completion = ShellComplete(cli, {}, "clusterddp", "_CLUSTERDDP_COMPLETE")
    return [item.value for item in completion.get_completions(["status", "--runs", "runs"], incomplete)]


def test_a_shell_completes_ones_own_runs_and_only_names_of_runs(place: Path) -> None:
    ended(make(place, "nice-fox-1", own=True))
    ended(make(place, "nice-run-2", own=False))
    named = "nice-run;touch${IFS}pwned;"
    ended(make(place, "nice-run-3", own=True)).path.rename(place / "runs" / named)
    (place / "runs" / ".login").mkdir()
    write_json(place / "runs" / ".login" / "nice;x.json", {"run": "nice;x", "profile": "p", "secrets": []})
    (place / "runs" / "nice-sweep").mkdir()
    write_json(place / "runs" / "nice-sweep" / "sweep.json", {"created_ns": 1})
    (place / "runs" / "nice-sweep" / "tasks.txt").write_text("nice-sweep.0;touch${IFS}pwned\n")
    assert completed("nice") == ["nice-fox-1"]
    assert completed("nice-sweep.") == []


def test_a_directory_with_another_name_than_a_runs_is_no_run(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    named = "nice-run;touch${IFS}pwned;"
    ended(make(place, "nice-run-3", own=True)).path.rename(place / "runs" / named)
    assert "nice-run" not in command(capfd, "list")[1]
    assert main(["status", f"runs/{named}"]) == RunNotFoundError.exit_code


@pytest.mark.parametrize("own", [True, False])
def test_reading_deletes_nothing_behind_a_link(place: Path, capfd: pytest.CaptureFixture[str], own: bool) -> None:
    (place / "config").mkdir()
    (place / "config" / "secrets.json").write_text("{}")
    run = ended(make(place, "nice-run-1", "slurm", own=own))
    run.launcher_dir.rename(run.path / "was")
    run.launcher_dir.symlink_to(place / "config")
    for line in ("list", "status nice-run-1", "report nice-run-1 --out -", "cancel nice-run-1"):
        command(capfd, line)
    assert (place / "config" / "secrets.json").exists()


def test_secrets_are_deleted_in_an_own_run_that_has_ended_and_in_no_other(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, own in (("calm-fox-1", True), ("nice-run-1", False)):
        run = ended(make(place, name, "slurm", own=own))
        write_json(run.job_secrets, {"KEY": "value"})
        command(capfd, f"status {name}")
        assert run.job_secrets.exists() != own


def test_an_event_is_not_written_through_a_link(place: Path) -> None:
    run = make(place, "nice-run-1", own=True)
    (place / "elsewhere").write_text("")
    run.events.symlink_to(place / "elsewhere")
    log_event(run, "resumed")
    assert (place / "elsewhere").read_text() == ""


def test_a_record_of_a_run_elsewhere_names_secrets_only_under_a_seal(place: Path) -> None:
    runs_dir = place / "runs"
    write_sent_run(runs_dir, SentRun(run="far-1", profile="hpc", secrets=("KEY",), created_ns=5))
    found = find_sent_run(runs_dir, "far-1")
    assert found is not None
    assert found.secrets == ("KEY",)
    record = read_json(runs_dir / ".login" / "far-1.json")
    assert isinstance(record, dict)
    write_json(runs_dir / ".login" / "far-1.json", record | {"secrets": ["GITHUB_TOKEN"]})
    found = find_sent_run(runs_dir, "far-1")
    assert found is not None
    assert found.secrets == ()
    assert find_sent_run(runs_dir, "@last") is None


def test_the_queue_of_a_sweep_without_a_seal_is_neither_started_nor_ended(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = place / "runs" / "nice-sweep"
    ended(make(place, "nice-sweep.0", own=False)).path.rename(place / "moved")
    sweep.mkdir()
    (place / "moved").rename(sweep / "nice-sweep.0")
    facts = {"sweep": "nice-sweep", "token": "0" * 32, "name": "mine", "launcher": "local", "created_ns": 1}
    write_json(sweep / "sweep.json", facts | {"keys": [], "size": 1})
    (sweep / "tasks.txt").write_text("nice-sweep.0\n")
    for line in ("resume nice-sweep", "cancel nice-sweep"):
        code, said = command(capfd, line)
        assert (code, REFUSED in said) == (2, True), said
    assert sorted(path.name for path in sweep.iterdir()) == ["nice-sweep.0", "sweep.json", "tasks.txt"]


def test_a_function_and_its_results_are_loaded_from_ones_own_run_only(place: Path) -> None:
    run = make(place, "nice-run-1", own=False)
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    plan["gang"]["entry"] |= {"kind": "function", "target": "job:f(x)"}
    write_json(run.plan, plan)
    ended(run)
    (run.attempt(0).path / "results").mkdir()
    run.attempt(0).result(1).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(UsageError, match="is unsealed"):
        clusterddp.Run.find("nice-run-1", runs_dir=place / "runs").results()
    assert acts(place) == []


def test_a_run_without_a_seal_goes_on_under_no_worker(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended(make(place, "nice-run-1", "worker", own=False))
    job = "name: other\nentry: {command: [true]}\ndevice: cpu\nsnapshot: false\nssh: {hosts: [127.0.0.1]}\n"
    (place / "job.yaml").write_text(job)
    code, said = command(capfd, "worker job.yaml --node-rank 0 --resume nice-run-1")
    assert (code, REFUSED in said) == (2, True), said


@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm"])
def test_a_run_without_a_seal_is_removed_here_and_no_host_is_asked(
    place: Path, capfd: pytest.CaptureFixture[str], launcher: str
) -> None:
    run = ended(make(place, "nice-run-1", launcher, own=False))
    assert command(capfd, "rm --older-than 1h --yes")[0] == 0
    assert run.path.exists()
    code, said = command(capfd, "rm nice-run-1 -n")
    assert (code, "unsealed: only this directory" in said) == (0, True), said
    if launcher == "ssh":
        code, said = command(capfd, "rm nice-run-1 --yes")
        assert (code, "its hosts are not asked: it is unsealed" in " ".join(said.split())) == (1, True), said
        assert "hint: --local removes it here" in said
    code, said = command(capfd, f"rm nice-run-1 --yes {'--local' if launcher == 'ssh' else ''}")
    assert (code, run.path.exists()) == (0, False), said
    assert acts(place) == []


def test_trust_shows_what_a_run_starts_and_makes_it_ones_own(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ended(make(place, "nice-run-1", "ssh", own=False))
    said = command(capfd, "resume nice-run-1 --trust --from-start")[1]
    for fact in ("launcher  ssh", f"touch {place}/pwned", "hosts     gpu01", "secrets   GITHUB_TOKEN"):
        assert fact in said
    assert REFUSED not in said
    assert "unsealed" not in command(capfd, "status nice-run-1")[1]
    assert find_run(place / "runs", "@last").name == run.name


@pytest.mark.parametrize("key", ["the user's", "another", "none"])
def test_a_job_starts_nothing_of_a_plan_that_was_changed_after_its_submit(
    place: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    run = make(place, "calm-fox-1", "slurm", own=True)
    record, plan = read_json(run.record), read_json(run.plan)
    assert isinstance(record, dict)
    assert isinstance(plan, dict)
    write_json(run.record, record | {"job_id": "77"})
    write_json(run.plan, plan | {"secrets": []})
    if key != "the user's":
        monkeypatch.setenv("XDG_STATE_HOME", str(place / "anothers"))
    if key == "another":
        make(place, "nice-run-1", own=False)
    argv = [sys.executable, "-m", "clusterddp.places.slurm.batch", str(run.path)]
    environ = os.environ | {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "x", "SLURMD_NODENAME": "node1"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert ("was changed after the submit" in said) == (key == "the user's"), said
    assert ("is not checked, for this machine lacks the key" in said) == (key != "the user's"), said
    assert any(call.startswith("srun") for call in acts(place)) == (key != "the user's")
