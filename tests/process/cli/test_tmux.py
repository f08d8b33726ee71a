"""Commands that show runs, in a real tmux of 80 and of 40 columns: what the terminal wraps, cuts and keeps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.ranks.environment import COOKIE
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.system.files import write_json
from tests.support.handmade_runs import complete, fail, make_run, start_attempt, train
from tests.support.waiting import wait_until
from tests.support.worker_ranks import demand

ROOT = Path(__file__).resolve().parents[3]
LONG = "plucky-pelican-48" + "-of-a-very-long-name" * 4
WIDE = "\u5b66\u7fd2-\u5b9f\u9a13"
HOSTILE = "evil\x1b]0;evil title\x07\x1b[31m"
COPIED = re.compile(
    r"plucky-pelican|  (runs/|\||the end of |(follow|cancel|go on|its log|try again|once fixed|repeat) )"
)
"""Lines of `status` that stay whole, so that they can be copied."""


class Tmux:
    """A tmux server of its own with one pane, in which one command runs after the other."""

    def __init__(self, place: Path, columns: int) -> None:
        self._place = place
        self._socket = place / "tmux"
        self._call = [demand("tmux"), "-u", "-f", os.devnull, "-S", str(self._socket)]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        self._environ = kept | {"LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        self.ask("new-session", "-d", "-x", str(columns), "-y", "24", "exec sleep 1000")
        self.ask("set-option", "-g", "status", "off")

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            [*self._call, *words],
            env=self._environ,
            cwd=self._place,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    def start(self, *arguments: str) -> None:
        """Run the command in the empty pane."""
        command = shlex.join([sys.executable, "-m", "clusterddp", *arguments])
        over = f"tmux -S {shlex.quote(str(self._socket))} wait-for -S over"
        self.ask("clear-history")
        self.ask("respawn-pane", "-k", f"{command}; {over}; exec sleep 1000")

    def run(self, *arguments: str) -> list[str]:
        """Run the command to its end; return its lines as it wrote them."""
        self.start(*arguments)
        self.ask("wait-for", "over")
        return self.lines()

    def lines(self, *, whole: bool = True, visible: bool = False) -> list[str]:
        """Return the lines so far, or what is visible of them; `whole`: those that the terminal wrapped as one."""
        found = self.ask("capture-pane", "-p", *([] if visible else ["-S", "-"]), *(["-J"] if whole else []))
        return [line.rstrip() for line in found.rstrip().split("\n")]

    def wrapped(self, *, visible: bool = False) -> list[str]:
        """Return the lines that the terminal wrapped."""
        rows = self.lines(whole=False, visible=visible)
        return [line for line in self.lines(visible=visible) if line not in rows]

    def screen(self) -> str:
        return "\n".join(self.lines(whole=False, visible=True))


@pytest.fixture(params=[80, 40])
def columns(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def tmux(runs_dir: Path, columns: int) -> Iterator[Tmux]:
    terminal = Tmux(runs_dir.parent, columns)
    yield terminal
    terminal.ask("kill-server")


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """A run with a long and a wide name that completed, one that failed with hostile text, and one that runs."""
    runs = tmp_path / "runs"
    done, failed, running = (make_run(runs, name) for name in (LONG, "bold-crane-12", "calm-lynx-3"))
    for run, name, steps in ((done, WIDE, 100), (failed, HOSTILE, 60), (running, "test", 30)):
        write_json(run.record, json.loads(run.record.read_text()) | {"name": name})
        train(run, steps=steps)
    complete(done, start_attempt(done))
    attempt = start_attempt(failed)
    fail(attempt)
    attempt.stdout(0).write_text(f"{HOSTILE}\x1b[2J {WIDE}\nthe last line {'x' * 100}\n")
    start_attempt(running)
    return runs


@pytest.mark.parametrize("command", ["list", "compare", "ps"])
def test_tables_fit_and_keep_names_and_values(tmux: Tmux, runs_dir: Path, columns: int, command: str) -> None:
    orphan = subprocess.Popen(["sleep", "600"], env={COOKIE: f"{read_run(RunDir(runs_dir / LONG)).token}.n0"})
    arguments = {"compare": ("compare", "bold-crane-12", LONG), "ps": ("ps", LONG)}.get(command, (command,))
    try:
        lines = tmux.run(*arguments)
    finally:
        orphan.kill()
        orphan.wait()
    assert not [line for line in tmux.wrapped() if not line.startswith(f"clusterddp gc {LONG} ")]
    assert not [line for line in lines if line.endswith("...")]
    rows = {line.split()[0]: line for line in lines if line}
    long_row = next((row for name, row in rows.items() if name.startswith("plucky-pelican")), "")
    if command == "list":
        assert "  COMPLETED  " in long_row
        assert "  FAILED  " in rows["bold-crane-12"]
        assert (WIDE[:2] in long_row, r"evil\x" in rows["bold-crane-12"]) == (columns == 80, columns == 80)
        assert len({line.index(state) for line, state in states_of(lines) if WIDE[0] not in line}) == 1
    elif command == "compare":
        assert "bold" in rows["results"]
        assert rows["accuracy"].split() == ["accuracy", "55.00%", "60.00%"]
        assert rows["state"].split() == ["state", "FAILED", "COMPLETED"]
    else:
        assert re.search(rf"orphaned +1: {orphan.pid}", "\n".join(lines))


def test_what_is_to_be_removed_is_named_whole(tmux: Tmux, columns: int) -> None:
    lines = tmux.run("rm", "-n", "bold-crane-12")
    assert tmux.wrapped() == []
    assert lines[0].split()[:1] + lines[0].split()[-1:] == ["RUN", "SIZE"]
    assert [line.startswith("bold-crane-12  ") for line in lines] == [False, True, False]
    assert LONG in tmux.run("rm", "-n", LONG)[1]


def states_of(lines: list[str]) -> list[tuple[str, str]]:
    found = [(line, re.search("COMPLETED|FAILED|RUNNING|STATE", line)) for line in lines]
    return [(line, state[0]) for line, state in found if state]


def test_only_what_is_copied_from_status_is_longer_than_a_line(tmux: Tmux, columns: int) -> None:
    for name, words in {
        LONG: (f"({WIDE})  COMPLETED", "accuracy 60.0%"),
        "bold-crane-12": ("FAILED", "ValueError: the loss is nan", r"(evil\x1b]0;evil title\x07\x1b[31m)"),
        "calm-lynx-3": ("RUNNING", "epoch 2/4"),
    }.items():
        lines = tmux.run("status", name)
        assert not [line for line in tmux.wrapped() if not COPIED.match(line)]
        text = " ".join(" ".join(lines).split())
        assert [word for word in words if " ".join(word.split()) not in text] == []
        (heading,) = [line for line in lines if line.split()[:1] == ["RANK"]]
        assert ("STATE" in heading, "MASTER" in heading) == (True, columns == 80)


def test_the_log_is_whole_and_commands_nothing(tmux: Tmux) -> None:
    title = tmux.ask("display-message", "-p", "#{pane_title}")
    lines = tmux.run("logs", "bold-crane-12", "--rank", "0")
    assert lines[0] == rf"evil\x1b]0;evil title\x07\x1b[31m\x1b[2J {WIDE}"
    assert lines[1] == f"the last line {'x' * 100}"
    assert tmux.ask("display-message", "-p", "#{pane_title}") == title


@pytest.mark.parametrize("columns", [80], indirect=True)
def test_a_watched_run_is_drawn_anew_when_the_terminal_is_resized(tmux: Tmux, runs_dir: Path) -> None:
    tmux.start("status", "-w", "calm-lynx-3")
    wait_until(lambda: "clusterddp cancel" in tmux.screen(), what="the first picture")
    for width in (40, 80):
        tmux.ask("resize-window", "-x", str(width), "-y", "24")
        expected = "local job\n    4711" if width == 40 else "local job 4711, 2 of 2"
        wait_until(lambda text=expected: text in tmux.screen(), what=tmux.screen)  # type: ignore[misc]
        assert tmux.screen().count("RUNNING  local") == 1
        assert tmux.screen().count("epoch 2/4") == 1
        assert tmux.wrapped(visible=True) == []
    attempt = RunDir(runs_dir / "calm-lynx-3").newest_attempt()
    write_end(attempt, AttemptEnd(outcome="COMPLETED", reason="done", ended=time.time()))
    tmux.ask("wait-for", "over")
    lines = tmux.screen().split("\n")
    assert lines[0].startswith("calm-lynx-3 (test)  COMPLETED  local job 4711")
    assert lines[-1] == "  repeat     clusterddp submit calm-lynx-3"
