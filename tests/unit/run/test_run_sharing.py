"""A shared run: what a second user reads of it, and what stays closed."""

from __future__ import annotations

import grp
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.errors import UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.sharing import close, closed_parents, share
from clusterddp.system.files import append_jsonl, read_json, write_json
from tests.support.handmade_runs import complete, fail, make_run, start_attempt

SECRET = "s3cret-value"
GROUP, USER = 65533, 65532
CLOSED = (
    "run.json",
    "plan.json",
    "spec.yaml",
    "launcher/secrets.json",
    "launcher/environment.json",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has ended, with a secret in each file that may have one."""
    run = make_run(tmp_path / "runs")
    plan = read_json(run.plan)
    assert plan is not None
    entry = {"args": ["--api-key", SECRET], "command": f"train --token={SECRET}"}
    spec = {"name": "a", "entry": entry, "env": {"KEY": SECRET}, "notify": {"url": SECRET}, "train": {"lr": 0.1}}
    gang = plan["gang"] | {
        "entry": plan["gang"]["entry"] | {"args": ["--api-key", SECRET]},
        "env": {"KEY": SECRET},
        "notify": {"on": ["end"], "command": [], "webhook": SECRET, "mail": None},
    }
    write_json(run.plan, plan | {"spec": spec, "gang": gang, "spec_text": SECRET, "rank0": {"KEY": {"value": SECRET}}})
    run.spec.write_text(f"name: a\nenv: {{KEY: {SECRET}}}\n")
    run.launcher_dir.mkdir(exist_ok=True)
    for path in (run.job_secrets, run.job_environment):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_json(path, {"KEY": SECRET})
    attempt = start_attempt(run)
    attempt.stdout(0).write_text("hello from rank 0\n")
    append_jsonl(run.metrics, {"kind": "log", "step": 1, "loss": 0.5, "attempt": 0})
    fail(attempt)
    for folder, names, files in os.walk(tmp_path):
        for name in names:
            Path(folder, name).chmod(0o700)
        for name in files:
            Path(folder, name).chmod(0o600)
    return run


def readable(run: RunDir) -> set[str]:
    """Return the files that the group may read, and reach."""
    return {
        str(path.relative_to(run.path))
        for path in run.path.rglob("*")
        if path.is_file() and all(each.stat().st_mode & 0o040 for each in (path, *path.parents) if each >= run.path)
    }


def test_logs_metrics_and_records_are_opened_and_secrets_are_not(run: RunDir) -> None:
    share(run, None)
    found = readable(run)
    assert {"metrics.jsonl", "attempts/0/end.json", "attempts/0/logs/rank-000.out", "shared/run.json"} <= found
    assert not found & set(CLOSED)
    assert not [path for path in found if SECRET in (run.path / path).read_text()]


def test_the_copies_have_no_token_and_no_value_of_a_variable(run: RunDir) -> None:
    token = json.loads(run.record.read_text())["token"]
    share(run, None)
    copies = {path.name: path.read_text() for path in (run.path / "shared").iterdir()}
    assert sorted(copies) == ["plan.json", "run.json"]
    assert not [name for name, text in copies.items() if token in text or SECRET in text or "t0ken" in text]
    assert json.loads(copies["plan.json"])["spec"]["train"] == {"lr": 0.1}


def test_a_spec_without_variables_is_opened(run: RunDir) -> None:
    plan = read_json(run.plan)
    assert plan is not None
    write_json(run.plan, plan | {"spec": {"name": "a"}})
    share(run, None)
    assert "spec.yaml" in readable(run)


def test_private_closes_all_of_it(run: RunDir) -> None:
    share(run, None)
    close(run.path)
    assert readable(run) == set()
    assert not (run.path / "shared").exists()
    assert not [path for path in run.path.rglob("*") if path.stat().st_mode & 0o077]


def test_a_link_out_of_the_run_opens_nothing(run: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "key").write_text(SECRET)
    (outside / "key").chmod(0o600)
    run.output.mkdir(mode=0o700)
    (run.output / "dir").symlink_to(outside)
    (run.output / "file").symlink_to(outside / "key")
    share(run, None)
    assert (outside.stat().st_mode & 0o777, (outside / "key").stat().st_mode & 0o777) == (0o700, 0o600)


def test_the_parents_that_the_group_cannot_enter_are_named_with_the_remedy(run: RunDir, tmp_path: Path) -> None:
    group = os.stat(run.path).st_gid
    tmp_path.chmod(0o700)
    run.path.parent.chmod(0o710)
    found = dict(closed_parents(run.path, group))
    assert found[tmp_path.resolve()] == f"chmod g+x {tmp_path.resolve()}"
    assert run.path.parent.resolve() not in found
    assert dict(closed_parents(run.path, 54321))[tmp_path.resolve()] == f"chmod o+x {tmp_path.resolve()}"


def test_a_group_that_does_not_exist_is_refused(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["share", str(run.path), "--group", "no-such-group"]) == 2
    assert "there is no group no-such-group" in capfd.readouterr().err


def test_share_prints_who_can_read_the_run_as_json(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o700)
    group = grp.getgrgid(os.stat(run.path).st_gid).gr_name
    assert main(["share", str(run.path), "--group", group, "-o", "json"]) == 0
    out, err = capfd.readouterr()
    shared = json.loads(out)
    assert {"directory": str(tmp_path), "fix": f"chmod g+x {tmp_path}"} in shared.pop("closed")
    facts = {"schema": 1, "run": run.name, "run_dir": str(run.path)}
    assert (shared, err) == (facts | {"group": group, "unfinished": False}, "")
    assert main(["share", str(run.path), "--private", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == facts | {"group": None, "closed": [], "unfinished": False}


@pytest.mark.root
def test_a_second_user_reads_and_commands_nothing(run: RunDir, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory.owner() == "root" and directory != Path("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    other = make_run(run.path.parent, "calm-lynx-4")
    other.launcher_dir.mkdir()
    complete(other, start_attempt(other))
    for each in (run, other):
        share(each, GROUP)
    run.path.parent.chmod(0o755)
    # The program has loaded all modules before it becomes the second user, who need not reach this Python.
    program = (
        "import contextlib, os, sys; os.environ['XDG_STATE_HOME'] = '/nonexistent'\n"
        "from clusterddp.cli.main import main\n"
        "run, other = sys.argv[1:3]\n"
        "with contextlib.redirect_stdout(sys.stderr):\n"
        "    for argv in sys.argv[3:]:\n"
        "        main([*argv.split(), run, *(['-n'] if argv in ('rm', 'resume') else [])])\n"
        "    main(['compare', run, other])\n"
        f"os.setgroups([{GROUP}]); os.setgid({USER}); os.setuid({USER}); print('now the other', file=sys.stderr)\n"
        "print('> compare', main(['compare', run, other]), flush=True)\n"
        "for argv in sys.argv[3:]: print('>', argv, main([*argv.split(), run]), flush=True)"
    )
    commands = ["status", "logs", "report --out -", "cancel", "resume", "rm", "share"]
    argv = [sys.executable, "-c", program, str(run.path), str(other.path), *commands]
    environ = os.environ | {"CLUSTERDDP_RUNS": str(run.path.parent)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, cwd="/", env=environ)
    said = done.stderr.rpartition("now the other")[2]
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]
    refused = ["cancel 2", "resume 2", "rm 2", "share 2"]
    assert lines == ["compare 0", "status 0", "logs 0", "report --out - 0", *refused], said
    assert "hello from rank 0" in done.stdout
    assert "FAILED" in done.stdout
    assert SECRET not in done.stdout + said
    assert said.count("belongs to another user") == len(refused), said


@pytest.mark.root
def test_another_user_s_run_is_not_shared(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(run.path, USER, USER)
    monkeypatch.setattr(os, "geteuid", lambda: 65531)
    with pytest.raises(UsageError, match="only that user can share it"):
        share(run, None)
