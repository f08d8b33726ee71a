"""Runs of a stranger in a directory that a user reads: a cloned repository, or a directory that several users share.

Each thing of `PLANTS` changes a run that looks as if it had failed, and does its harm through another command. Its
program, `ssh`, `sbatch` and git all write into one file, `Trap.sprung`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterddp.places.staging import make_run
from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, write_json
from tests.support.handmade_runs import fail, start_attempt
from tests.support.launch_runs import bare_repository, plan_text

NAME = "best-run-1"
_HUGE_BYTES = 3 << 30
_FIVE_THOUSAND_DIGITS = "9" * 5_000
_PROGRAMS = ("ssh", "sbatch", "scancel", "srun", "salloc", "scontrol", "mail", "sendmail")
_CREATED_NS = 1 << 62
"""Newer than all, so that it is `@last`."""


@dataclass(frozen=True)
class Trap:
    """Where a user reads, and how a test sees that something of the stranger's was started."""

    home: Path
    project: Path
    sprung: Path

    @property
    def runs(self) -> Path:
        return self.project / "runs"

    @property
    def command(self) -> str:
        return f"echo sprung >> {self.sprung}"

    @property
    def programs(self) -> Path:
        return self.home / "programs"

    def make_programs(self) -> None:
        """Make programs that only write down that they were started."""
        self.programs.mkdir()
        for name in _PROGRAMS:
            (self.programs / name).write_text(f"#!/bin/sh\necho {name} $@ >> {self.sprung}\nexit 1\n")
            (self.programs / name).chmod(0o755)


Plant = Callable[[RunDir, Trap], None]


def plant_run(trap: Trap, plant: Plant, *, more: str = "", name: str = NAME) -> RunDir:
    """Make the stranger's run, sealed by the stranger's key, and plant a thing in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(trap.home.parent / "stranger"))
        text = f'name: mine\nentry: {{command: "{trap.command}", shell: true}}\n{more}'
        run = RunDir(make_run(plan_text(text, trap.project, environ={"PATH": os.environ["PATH"]}), {}).run_dir)
    shutil.rmtree(run.path / "attempts")
    fail(start_attempt(run))
    record = read_json(run.record)
    assert isinstance(record, dict)
    write_json(run.record, record | {"created_ns": _CREATED_NS, "run": name})
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    write_json(run.plan, plan | {"run": name})
    moved = RunDir(run.path.rename(run.path.parent / name))
    plant(moved, trap)
    return moved


def _nothing(run: RunDir, trap: Trap) -> None:
    """The program of the run is harm enough."""


def _change_plan(run: RunDir, change: Mapping[str, Any]) -> None:
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    write_json(run.plan, plan | change)


def _without_a_seal(run: RunDir, trap: Trap) -> None:
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    write_json(run.plan, {key: value for key, value in plan.items() if "seal" not in key})


def _git(run: RunDir, trap: Trap) -> None:
    bare_repository(run.output / "g", trap.command)
    write_json(run.environment, {"git": {"root": str(run.output / "g"), "commit": "1" * 40, "dirty": False}})


def _secrets_of_the_reader(run: RunDir, trap: Trap) -> None:
    shutil.rmtree(run.launcher_dir, ignore_errors=True)
    run.launcher_dir.symlink_to(trap.home / "app")


def _events_of_the_reader(run: RunDir, trap: Trap) -> None:
    for path in (run.events, run.metrics):
        path.unlink(missing_ok=True)
        path.symlink_to(trap.home / "app" / "notes.jsonl")


def _attempts_elsewhere(run: RunDir, trap: Trap) -> None:
    for path in (run.path / "attempts", run.output, run.notices):
        shutil.rmtree(path, ignore_errors=True)
        path.symlink_to(trap.home / "app")


def _fifo(name: str) -> Plant:
    def plant(run: RunDir, trap: Trap) -> None:
        path = run.path / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return plant


def _huge(name: str) -> Plant:
    def plant(run: RunDir, trap: Trap) -> None:
        os.truncate(os.open(run.path / name, os.O_CREAT | os.O_WRONLY), _HUGE_BYTES)

    return plant


def _text(name: str, text: str) -> Plant:
    def plant(run: RunDir, trap: Trap) -> None:
        (run.path / name).write_text(text)

    return plant


def _words_of_a_shell(run: RunDir, trap: Trap) -> None:
    shutil.copytree(run.path, run.path.parent / f"best-run;touch${{IFS}}{trap.sprung.name};", symlinks=True)


def _many_differences(run: RunDir, trap: Trap) -> None:
    lines = [f"line {(number * number) % 179}\n" for number in range(50_000)]
    code = run.path / "code"
    if code.is_symlink() or code.exists():
        shutil.rmtree(code) if code.is_dir() and not code.is_symlink() else code.unlink()
    code.mkdir()
    for number in range(20):
        (code / f"file{number}.py").write_text("".join(lines[number:]))


def _modules(run: RunDir, trap: Trap) -> None:
    for place in (run.path, trap.runs, run.launcher_dir, trap.project):
        place.mkdir(exist_ok=True)
        for module in ("json", "torch", "re", "clusterddp", "sitecustomize"):
            (place / f"{module}.py").write_text(f"open({str(trap.sprung)!r}, 'a').write('imported {module}\\n')\n")


_ROWS = [
    '{"event": []}',
    '{"event": {"a": 1}, "time": "x"}',
    "[]",
    "7",
    '{"event": "restart", "time": 1e999}',
    f'{{"event": "restart", "attempt": {_FIVE_THOUSAND_DIGITS}}}',
    f'{{"kind": "train", "step": {_FIVE_THOUSAND_DIGITS}, "loss": 1, "attempt": 0}}',
    '{"kind": [], "step": {}, "loss": []}',
    "\x1b]0;evil\x07",
]
_PATHS = ("run.json", "plan.json", "events.jsonl", "metrics.jsonl", "attempts/0/end.json")

PLANTS: dict[str, tuple[Plant, str]] = {
    "a program": (_nothing, ""),
    "no seal": (_without_a_seal, ""),
    "hosts": (_nothing, "launcher: ssh\nsnapshot: false\nssh: {hosts: [127.0.0.1]}\n"),
    "hosts without a seal": (_without_a_seal, "launcher: ssh\nsnapshot: false\nssh: {hosts: [127.0.0.1]}\n"),
    "a batch job": (_nothing, "launcher: slurm\nslurm: {partition: x}\n"),
    "a message": (_nothing, 'notify: {"on": [end, fail], command: [sh, -c, "exit 1"]}\n'),
    "a repository": (_git, ""),
    "a link to secrets": (_secrets_of_the_reader, ""),
    "a link to rows": (_events_of_the_reader, ""),
    "links to directories": (_attempts_elsewhere, ""),
    "words of a shell": (_words_of_a_shell, ""),
    "many differences": (_many_differences, ""),
    "modules": (_modules, ""),
    "odd events": (_text("events.jsonl", "\n".join(_ROWS) + "\n"), ""),
    "odd metrics": (_text("metrics.jsonl", "\n".join(_ROWS) + "\n"), ""),
    "a long number": (_text("run.json", f'{{"created_ns": {_FIVE_THOUSAND_DIGITS}}}'), ""),
    **{f"a FIFO {path}": (_fifo(path), "") for path in _PATHS},
    **{f"3 GB of {path}": (_huge(path), "") for path in _PATHS},
}
"""What a stranger plants: its name, how, and further lines of the run's spec."""
