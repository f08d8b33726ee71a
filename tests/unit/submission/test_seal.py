"""A runs directory that travels is read and not obeyed: hosts that it names are asked only if we wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.ssh.host_run import find_host_runs
from clusterddp.places.staging import make_run
from clusterddp.planning.plan import read_plan
from clusterddp.run.code import store_of
from clusterddp.run.directory import RunDir
from clusterddp.run.seal import demand_sealed, is_sealed, key_path, sealed
from clusterddp.system.files import read_json, write_json
from clusterddp.view.ps import hosts_of
from tests.support.launch_runs import git, plan_text

SPEC = "name: a\nlauncher: ssh\nssh: {hosts: [gpu01]}\ntrain: {dataset: shapes}\n"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of another user, which has nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run over SSH as it lies before its start."""
    git(tmp_path, "init")
    plan = make_run(plan_text(SPEC, tmp_path), dict(os.environ))
    return RunDir(plan.run_dir)


def clusterddp(place: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a command where ssh only writes down that it was called; return how it ended, and the calls."""
    programs, calls = place / "programs", place / "calls"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexit 255\n')
    (programs / "ssh").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp", *arguments],
        cwd=place,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "GITHUB_TOKEN": "hunter2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, calls.read_text() if calls.exists() else ""


def test_a_run_that_we_have_planned_has_its_hosts(run: RunDir) -> None:
    assert [each.host for each in find_host_runs(run)] == ["gpu01"]


@pytest.mark.parametrize(
    "change",
    [
        {"python": "/tmp/x"},
        {"ssh": {"root": "/tmp/x"}},
        {"gang": {"token": "0" * 32}},
        {"gang": {"env": {"LD_PRELOAD": "/tmp/x.so"}}},
        {"gang": {"restarts": 7}},
        {"secrets": ["GITHUB_TOKEN"]},
        {"launcher": "local"},
        {"new": 1},
        {"seal": "0" * 64},
        {"seal": None},
        {"seal": 7},
    ],
    ids=str,
)
def test_a_plan_that_another_program_has_changed_is_not_obeyed(run: RunDir, change: dict[str, Any]) -> None:
    plan = read_json(run.plan)
    assert plan is not None
    plan["ssh"]["hosts"][0] |= {name: value for name, value in change.items() if name == "python"}
    for name, value in change.items():
        plan[name] = plan[name] | value if isinstance(value, dict) else value
    write_json(run.plan, plan)
    said: list[str] = []
    assert find_host_runs(run, said.append) == []
    assert f"{run.name} is unsealed, so nothing of it is started, asked or ended" in said[0]
    with pytest.raises(UsageError, match="is unsealed"):
        read_plan(run)
    with pytest.raises(UsageError, match="is unsealed"):
        hosts_of(run)


def test_a_plan_of_another_user_names_no_host(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert find_host_runs(run) == []
    assert not key_path().exists()


def test_status_of_a_run_from_elsewhere_connects_to_no_host_and_says_so(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = read_json(run.record)
    assert record is not None
    write_json(run.record, record | {"job_id": "gpu01:77"})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    done, calls = clusterddp(tmp_path, "status", run.name)
    assert "is unsealed, so nothing of it is started, asked or ended" in done.stderr
    assert calls == ""


@pytest.mark.parametrize("command", ["ps", "gc -n", "cancel", "logs", "wait --timeout 0"])
def test_no_command_connects_to_the_hosts_of_a_run_from_elsewhere(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    record = read_json(run.record)
    assert record is not None
    write_json(run.record, record | {"job_id": "gpu01:77"})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    name, *options = command.split()
    done, calls = clusterddp(tmp_path, name, run.name, *options)
    assert "is unsealed, so nothing of it is started, asked or ended" in done.stderr
    assert calls == ""


def test_a_note_in_a_runs_directory_that_travels_leads_nowhere(tmp_path: Path) -> None:
    note = {
        "run": "demo",
        "profile": "hpc",
        "created_ns": 4611686018427387904,
        "login": {"host": "evil.example.com", "host_key": f"SHA256:{'A' * 43}", "runs_dir": "/x"},
        "secrets": ["GITHUB_TOKEN"],
    }
    (tmp_path / "runs" / ".login").mkdir(parents=True)
    (tmp_path / "runs" / ".login" / "x.json").write_text(json.dumps(note))
    done, calls = clusterddp(tmp_path, "status", "@last")
    assert calls == ""
    assert "evil" not in done.stdout + done.stderr


@pytest.mark.root
@pytest.mark.parametrize("of", ["plan.json", "."])
def test_a_run_of_another_user_is_not_obeyed_under_any_seal(run: RunDir, of: str) -> None:
    assert demand_sealed(run)["run"] == run.name
    os.chown(run.path / of, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        demand_sealed(run)


def test_the_key_is_made_once_and_no_other_user_can_read_it(state: Path) -> None:
    assert not is_sealed({"x": [1, 2], "seal": ""})
    first = sealed({"x": [1, 2], "y": {8: None}})
    assert is_sealed({"y": {"8": None}, "x": (1, 2), "seal": first["seal"]})
    assert not is_sealed({"x": [1, 2], "seal": first["seal"]})
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert key_path().parent == state / "clusterddp"


@pytest.mark.parametrize("spoil", ["open", "short", "link"])
def test_a_key_that_others_may_know_is_refused(state: Path, spoil: str) -> None:
    sealed({"a": 1})
    key = key_path()
    if spoil == "open":
        key.chmod(0o644)
    elif spoil == "short":
        key.write_bytes(b"abc")
    else:
        key.rename(state / "elsewhere")
        key.symlink_to(state / "elsewhere")
    with pytest.raises(ClusterddpError, match=str(key)):
        sealed({"a": 1})


@pytest.mark.root
def test_a_run_that_another_user_keeps_closed_hides_no_other_run(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory.owner() == "root" and directory != Path("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    for name, uid, mode in (("open-fox-1", 65533, 0o755), ("shy-lynx-2", 65534, 0o700)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        write_json(run / "run.json", {"created_ns": 1})
        (run / "run.json").chmod(0o644)
        run.chmod(mode)
        os.chown(run, uid, uid)
    program = (
        "import os, sys; from pathlib import Path; from clusterddp.run.find import find_run, list_runs\n"
        "runs = Path(sys.argv[1]); os.setuid(65533)\n"
        "print([run.name for run in list_runs(runs)], find_run(runs, 'open').name)"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout == "['open-fox-1'] open-fox-1\n", done.stderr


@pytest.mark.root
def test_the_code_of_a_run_never_lies_in_another_users_directory(tmp_path: Path) -> None:
    assert store_of(tmp_path) == tmp_path / ".code"
    (tmp_path / ".code").mkdir(mode=0o700)
    assert store_of(tmp_path) == tmp_path / ".code"
    os.chown(tmp_path / ".code", 65534, 65534)
    assert store_of(tmp_path) == tmp_path / f".code-{os.geteuid()}"


def test_a_link_is_no_place_for_the_code(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".code").symlink_to(tmp_path / "elsewhere")
    assert store_of(tmp_path) == tmp_path / f".code-{os.geteuid()}"
