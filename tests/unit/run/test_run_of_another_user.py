"""A run that its owner has opened to a group by chmod: what a second user reads of it, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl, read_json, write_json
from tests.support.handmade_runs import complete, fail, make_run, start_attempt

SECRET = "s3cret-value"
GROUP, USER = 65533, 65532


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has ended, with a secret in each file that may have one."""
    run = make_run(tmp_path / "runs")
    plan = read_json(run.plan)
    assert plan is not None
    entry = {"args": ["--api-key", SECRET], "command": f"train --token={SECRET}"}
    spec = {"name": "a", "entry": entry, "env": {"KEY": SECRET}, "notify": {"webhook": SECRET}, "train": {"lr": 0.1}}
    gang = plan["gang"] | {
        "entry": plan["gang"]["entry"] | {"args": ["--api-key", SECRET]},
        "env": {"KEY": SECRET},
        "notify": {"on": ["end"], "command": [], "webhook": SECRET, "mail": None},
    }
    write_json(run.plan, plan | {"spec": spec, "gang": gang, "spec_text": SECRET, "rank0": {"KEY": {"value": SECRET}}})
    run.spec.write_text(f"name: a\nenv: {{KEY: {SECRET}}}\n")
    run.launcher_dir.mkdir(exist_ok=True)
    write_json(run.job_environment, {"KEY": SECRET})
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


@pytest.mark.root
def test_a_second_user_reads_and_commands_nothing(run: RunDir, tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if directory.owner() == "root" and directory != Path("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    other = make_run(run.path.parent, "calm-lynx-4")
    other.launcher_dir.mkdir()
    complete(other, start_attempt(other))
    for each in (run, other):
        subprocess.run(["chgrp", "-R", str(GROUP), each.path], check=True)
        subprocess.run(["chmod", "-R", "g+rX", each.path], check=True)
    run.job_environment.chmod(0o600)
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
    commands = ["status", "logs", "report --out -", "cancel", "resume", "rm"]
    argv = [sys.executable, "-c", program, str(run.path), str(other.path), *commands]
    environ = os.environ | {"CLUSTERDDP_RUNS": str(run.path.parent)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, cwd="/", env=environ)
    said = done.stderr.rpartition("now the other")[2]
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]
    refused = ["cancel 2", "resume 2", "rm 2"]
    assert lines == ["compare 0", "status 0", "logs 0", "report --out - 0", *refused], said
    assert "hello from rank 0" in done.stdout
    assert "FAILED" in done.stdout
    assert SECRET not in done.stdout + said
    assert said.count("belongs to another user") == len(refused), said
