"""What `logs` shows of time, patterns and equal lines, and its line on a terminal before there is output."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.cli.watch import starting_text
from clusterddp.places.state import read_state
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl
from tests.support.handmade_runs import complete, make_batch_run, make_run, start_attempt, start_step


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["logs", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def make_log(run: RunDir) -> None:
    """Write a line by an hour ago, one by now, and note both."""
    attempt, now = start_attempt(run), time.time()
    for rank in (0, 1):
        attempt.stdout(rank).write_text("old\nnew\n")
        for ago_s, size in ((3600, 4), (0, 8)):
            note = {"time": now - ago_s, "sizes": {attempt.stdout(rank).name: size}}
            append_jsonl(attempt.log_times(0), note)


def test_lines_are_chosen_by_time_and_pattern(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_log(make_run(runs_dir))
    assert shown(capfd, "--since", "10m")[1] == "new\n"
    assert shown(capfd, "--grep", "^o")[1] == "old\n"
    assert shown(capfd, "--since", "10m", "--grep", "^o") == (0, "", "rank 0 of brisk-otter-3 has no such line\n")


def test_lines_begin_with_their_times(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_log(make_run(runs_dir))
    stamp = shown(capfd, "--timestamps", "--tail", "1")[1].split()[0]
    assert abs(time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S")) - time.time()) < 60


def test_equal_lines_of_ranks_are_folded_unless_they_are_not_to_be(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_log(make_run(runs_dir))
    assert shown(capfd, "--rank", "all")[1] == "[ranks 0-1] old\n[ranks 0-1] new\n"
    assert len(shown(capfd, "--rank", "all", "--no-fold")[1].splitlines()) == 4


def test_as_json_each_line_is_an_object(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_log(make_run(runs_dir))
    rows = [json.loads(line) for line in shown(capfd, "--rank", "all", "-o", "json")[1].splitlines()]
    assert [(row["ranks"], row["text"], row["ends"]) for row in rows] == [([0, 1], "old", True), ([0, 1], "new", True)]
    assert rows[0]["schema"] == 1
    assert rows[1]["time"] - rows[0]["time"] == pytest.approx(3600, abs=60)


@pytest.mark.parametrize("arguments", [("--since", "soon"), ("--grep", "(")])
def test_a_time_or_pattern_that_is_none_is_a_wrong_usage(
    arguments: tuple[str, str], runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_log(make_run(runs_dir))
    assert shown(capfd, *arguments)[0] == 2


def test_ranks_that_have_started_are_counted(runs_dir: Path) -> None:
    run = make_run(runs_dir, nodes=2)
    attempt = start_attempt(run, ranks=3)
    assert starting_text(run, read_state(run)).endswith("3 of 4 ranks started")
    for path in attempt.ranks.iterdir():
        path.unlink()
    assert "STARTING" not in starting_text(run, read_state(run))


@contextlib.contextmanager
def following() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Follow the newest run; standard error is a terminal, whose other end is returned, too."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "clusterddp", "logs", "-f"]
    environ = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=theirs, env=environ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def test_a_line_has_the_state_until_there_is_output(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    with following() as (process, terminal):
        seen = b""
        while b"PENDING" not in seen:
            seen += os.read(terminal, 4096)
        attempt = start_attempt(run)
        while b"2 ranks started, no output yet" not in seen:
            seen += os.read(terminal, 4096)
        attempt.stdout(0).write_text("one\n")
        assert process.stdout is not None
        assert process.stdout.readline() == b"one\n"
        while not seen.endswith(b"\r\x1b[K"):
            seen += os.read(terminal, 4096)
        complete(run, attempt)
        assert (process.stdout.read(), process.wait()) == (b"", 0)


def test_logs_of_a_batch_script_are_the_output_of_its_job(
    runs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "slurm-1.out", tmp_path / "slurm-1.err"]
    run = make_batch_run(runs_dir, stdout=str(paths[0]), stderr=str(paths[1]))
    assert "no file with its output is seen from here" in shown(capfd)[2]
    paths[0].write_text("setup\nloss 1\n")
    assert shown(capfd)[:2] == (0, "setup\nloss 1\n")
    paths[1].write_text("warning\n")
    start_step(run).attempt(0).stdout(0).write_text("loss 1\n")
    assert shown(capfd)[1] == "setup\nloss 1\nwarning\n"
    assert shown(capfd, "--grep", "loss")[1] == "loss 1\n"
    code, out, said = shown(capfd, "-o", "json", "--tail", "1")
    assert [(code, row["ranks"], row["text"]) for row in map(json.loads, out.splitlines())] == [
        (0, [], "loss 1"), (0, [], "warning")
    ]  # fmt: skip
    assert str(paths[0]) in said
    assert "were not recorded" in shown(capfd, "--timestamps")[2]


def test_the_output_of_a_batch_script_is_followed_over_its_steps(runs_dir: Path, tmp_path: Path) -> None:
    run = make_batch_run(runs_dir, stdout=str(tmp_path / "slurm-1.out"))
    with following() as (process, _):
        assert process.stdout is not None
        with open(tmp_path / "slurm-1.out", "w") as output:
            for number in range(2):
                output.write(f"step {number}\n")
                output.flush()
                assert process.stdout.readline() == b"step %d\n" % number
                step = start_step(run)
                complete(step, step.attempt(0))
        write_end(run.attempt(0), AttemptEnd(outcome="COMPLETED", reason="train.slurm exited with code 0"))
        assert (process.stdout.read(), process.wait()) == (b"", 0)


def test_ranks_of_a_batch_script_are_those_of_the_step_that_runs_or_of_one_that_is_named(
    runs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm-1.out").write_text("setup\n")
    run = make_batch_run(runs_dir, stdout=str(tmp_path / "slurm-1.out"))
    code, _, said = shown(capfd, "--rank", "0")
    assert (code, "no ranks" in said, str(tmp_path / "slurm-1.out") in said) == (2, True, True)
    first, second = start_step(run), start_step(run)
    first.attempt(0).stdout(1).write_text("first\n")
    second.attempt(0).stdout(1).write_text("second\n")
    complete(first, first.attempt(0))
    assert shown(capfd, "--rank", "1")[1] == "second\n"
    assert shown(capfd, "--rank", "1", "--step", "0")[1] == "first\n"
    assert shown(capfd, "--rank", "1", "--step", "0", "-f")[1] == "first\n"  # the step has ended
    assert "--step 7: brisk-otter-3 has 0, 1" in shown(capfd, "--step", "7")[2]


def test_a_run_without_a_batch_script_has_no_steps(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_log(make_run(runs_dir))
    assert "--step 0: brisk-otter-3 has no steps" in shown(capfd, "--step", "0")[2]
