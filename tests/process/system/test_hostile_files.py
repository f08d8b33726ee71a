"""Files of a run that its owner did not write: whatever is in their place, all commands go on for all other runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl, write_json
from tests.support.handmade_runs import complete, fail, make_run, start_attempt
from tests.support.waiting import PATIENCE

LONGEST_S = 4 * PATIENCE
GIANT = 3 << 30
MOST_MEMORY = 3 << 29
ROW = {"event": [], "attempt": {}, "time": "x", "kind": [], "what": [], "by": [], "rows": {}, "step": [], "sizes": []}
TEXTS = {
    "a row of wrong types": json.dumps(ROW),
    "a number of 5,000 digits": json.dumps({"event": "x", "time": 1}).replace("1", "9" * 5000),
    "a line of 20 MB": "x" * 20_000_000,
    "an event whose name is a list": json.dumps(ROW | {"attempt": 0, "time": 1.0}),
}
KINDS = ("a pipe", "3 GB of nothing", "a directory", "a link to a device", "a link to a file", *TEXTS)
COMMANDS = (
    *("list --wide", "status RUN", "report RUN --out -", "compare RUN other"),
    *("logs RUN --rank all", "logs RUN --tail 5 --timestamps --since 10m"),
)
PROGRAM = """
import contextlib, io, json, resource, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from clusterddp.cli.main import main
from tests.process.system.test_hostile_files import COMMANDS, LONGEST_S, MOST_MEMORY, plant

run, kind = Path(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
class Kept(io.BytesIO):
    def close(self): pass
    def write(self, data): return super().write(data) if self.tell() < 200_000 else len(data)
def stop(*_): raise TimeoutError('takes too long')
signal.signal(signal.SIGALRM, stop)
for path in sorted(path for path in run.rglob('*') if path.is_file()):
    kept = path.rename(path.with_name('.kept'))
    plant(kind, path, run)
    for command in COMMANDS:
        if kind.startswith('3 GB') and path.suffix in ('.out', '.err') and command.startswith('logs'):
            continue  # it prints the 3 GB that it was asked for
        out, err, began = Kept(), io.StringIO(), time.monotonic()
        signal.alarm(int(LONGEST_S) + 1)
        try:
            with contextlib.redirect_stdout(io.TextIOWrapper(out, write_through=True)), contextlib.redirect_stderr(err):
                code = main([*command.replace('RUN', run.name).split(), '--runs', str(run.parent)])
        except BaseException as error:
            code = f'{type(error).__name__}: {error}'
        signal.alarm(0)
        text = out.getvalue().decode(errors='replace')
        print(json.dumps([str(path.relative_to(run)), command, code, time.monotonic() - began, text[:100_000],
                          err.getvalue()[:2000]]), flush=True)
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    kept.rename(path)
"""


def plant(kind: str, path: Path, run: Path) -> None:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "3 GB of nothing":
        path.touch()
        os.truncate(path, GIANT)
    elif kind == "a directory":
        path.mkdir()
    elif kind.startswith("a link"):
        path.symlink_to("/dev/zero" if kind == "a link to a device" else run.parent / "theirs")
    else:
        path.write_text(TEXTS[kind] + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has failed, with each file that a command reads, beside another one."""
    runs = tmp_path / "runs"
    other = make_run(runs, "other")
    complete(other, start_attempt(other))
    (runs / "theirs").write_text("not yours\n")
    run = make_run(runs)
    attempt = start_attempt(run)
    for row in ({"event": "submitted", "attempt": 0, "time": 1.0}, {"event": "hang", "attempt": 0, "time": 2.0}):
        append_jsonl(run.events, row)
    append_jsonl(run.metrics, {"kind": "train", "attempt": 0, "step": 1, "loss": 1.0})
    append_jsonl(attempt.log_times(0), {"time": 1.0, "sizes": {"rank-000.out": 6}})
    for path in (run.environment, run.summary, attempt.usage, attempt.error_file(0), attempt.claim):
        write_json(path, {})
    for rank in (0, 1):
        for log in (attempt.stdout(rank), attempt.stderr(rank), attempt.nccl(rank)):
            log.write_text("hello\n")
    run.spec.write_text("name: a\n")
    run.launcher_dir.mkdir(exist_ok=True)
    for name in ("supervisor-0.log", "submit.log", "job.log", "tasks.log"):
        (run.launcher_dir / name).write_text("hello\n")
    run.code.mkdir()
    (run.code / "train.py").write_text("print(1)\n")
    other.code.mkdir()
    (other.code / "train.py").write_text("print(2)\n")
    fail(attempt)
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_place_of_a_file_stops_no_command_for_other_runs(run: RunDir, kind: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(run.path), kind],
        cwd=root,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 20 * len(COMMANDS), done.stdout[-500:]
    wrong = [
        (file, command, code, round(seconds, 1), err)
        for file, command, code, seconds, text, err in found
        if not isinstance(code, int)
        or seconds > LONGEST_S
        or "internal" in err
        or "not yours" in text
        or (command.startswith("list") and (code != 0 or "other" not in text))
    ]
    assert wrong == []
