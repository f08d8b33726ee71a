"""Commands that watch: a sweep as one table until it ends, lines of `wait`, what is said at the end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from clusterddp.cli import watch
from clusterddp.cli.main import main
from clusterddp.cli.watch import progress_lines
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.rank_usage import RankUsage, Straggler, UsageReport, write_usage
from clusterddp.run.record import ProcessIdentity
from clusterddp.run.state import RunState, RunView
from clusterddp.run.sweep import SweepDir, SweepRecord, write_sweep
from clusterddp.system.files import write_json
from tests.support.handmade_runs import complete, fail, make_run, start_attempt, train


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def make_sweep(runs_dir: Path, size: int) -> SweepDir:
    """Make a sweep whose runs are PENDING."""
    sweep = SweepDir(runs_dir / "keen-heron-5")
    for number in range(size):
        run = make_run(sweep.path, f"{sweep.name}.{number}")
        write_json(run.record, json.loads(run.record.read_text()) | {"variant": f"lr=0.{number}"})
    sweep.tasks.write_text("".join(f"{sweep.name}.{number}\n" for number in range(size)))
    record = SweepRecord(
        sweep=sweep.name,
        token="t0",
        name="test",
        launcher="local",
        created_ns=time.time_ns(),
        keys=("train.lr",),
        size=size,
    )
    write_sweep(sweep, record)
    return sweep


def watching(runs_dir: Path, *arguments: str, rows: int = 30, columns: int = 80) -> pexpect.spawn:
    return pexpect.spawn(
        sys.executable,
        ["-m", "clusterddp", "status", "-w", *arguments],
        env=os.environ | {"TERM": "xterm-256color", "CLUSTERDDP_RUNS": str(runs_dir)},
        dimensions=(rows, columns),
        encoding="utf-8",
        timeout=30,
    )


def test_a_sweep_is_watched_as_one_table_until_it_ends(runs_dir: Path) -> None:
    sweep = make_sweep(runs_dir, 3)
    child = watching(runs_dir, sweep.name)
    child.expect("3 .*PENDING")
    first, second, third = sweep.runs()
    attempt = start_attempt(first)
    child.expect("RUNNING.* 2 .*PENDING")
    complete(first, attempt)
    fail(start_attempt(second))
    complete(third, start_attempt(third))
    child.expect("2 .*COMPLETED.*, 1 .*FAILED")
    child.expect(pexpect.EOF)
    assert re.search(r"heron-5.2 +lr=0.2 .*COMPLETED", str(child.before))
    child.close()
    assert child.exitstatus == 0


def test_a_long_sweep_shows_what_runs_and_what_failed_first(runs_dir: Path) -> None:
    sweep = make_sweep(runs_dir, 30)
    for run in sweep.runs():
        complete(run, start_attempt(run))
    child_run = sweep.runs()[27]
    child_run.newest_attempt().end.unlink()
    child = watching(runs_dir, sweep.name, rows=12)
    child.expect("heron-5.27")
    child.expect(r"\.\.\. and \d+ more: clusterddp list keen-heron-5")
    complete(child_run, child_run.newest_attempt())
    child.expect(pexpect.EOF)
    assert "heron-5.29" in str(child.before)


def test_a_watched_sweep_as_json_is_a_line_per_change(runs_dir: Path) -> None:
    sweep = make_sweep(runs_dir, 2)
    argv = [sys.executable, "-m", "clusterddp", "status", "-w", sweep.name, "-o", "json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["states"] == {"PENDING": 2}
        for run in sweep.runs():
            complete(run, start_attempt(run))
        lines = [json.loads(line) for line in process.stdout]
    assert lines[-1]["states"] == {"COMPLETED": 2}


def test_a_run_that_does_not_change_is_one_line_of_json(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    attempt = start_attempt(run)
    argv = [sys.executable, "-m", "clusterddp", "status", "-w", "-o", "json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(2.5)  # two more reads
        complete(run, attempt)
        states = [json.loads(line)["state"] for line in (first, *process.stdout)]
    assert states == ["RUNNING", "COMPLETED"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    return now


def test_a_line_of_wait_that_repeats_has_its_time(
    tmp_path: Path, clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    view = RunView(state=RunState.RUNNING, attempt=0, end=None, reason="")
    with progress_lines(RunDir(tmp_path / "mild-owl-1")) as show:
        for _ in range(1200):
            show(view, None)
            clock[0] += 0.5
    assert capfd.readouterr().err == "mild-owl-1 RUNNING\nmild-owl-1 RUNNING  (5m 00s)\n"


def test_the_status_of_a_completed_run_names_its_checkpoint_and_what_comes_next(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(runs_dir)
    write_json(run.plan, json.loads(run.plan.read_text()) | {"spec": {"train": {"epochs": 4}}})
    complete(run, start_attempt(run))
    for name in ("step-000090-a0", "step-000100-a0", "step-000110-a0"):
        (run.checkpoints / f"{name}.json").write_text("{}")
        (run.checkpoints / f"{name}.pt").write_bytes(b"x")
    (run.checkpoints / "step-000110-a0.pt").unlink()  # it was not finished
    assert main(["status", run.name]) == 0
    out = capfd.readouterr().out
    assert f"checkpoint: {run.checkpoints / 'step-000100-a0.pt'}, step 100\n" in out
    assert out.endswith(f"  go further clusterddp resume {run.name} train.epochs=N\n")
    assert main(["status", run.name, "-o", "json"]) == 0
    shown = json.loads(capfd.readouterr().out)["checkpoint"]
    assert (shown["step"], shown["host"]) == (100, None)


@pytest.mark.parametrize(
    ("manifest", "age"), [('{"created": %d}', ", 1m 3"), ("{}", "\n"), ('{"created": "now"}', "\n"), ("[]", "\n")]
)
def test_a_run_under_way_names_the_step_and_the_age_of_its_checkpoint(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], manifest: str, age: str
) -> None:
    run = make_run(runs_dir)
    start_attempt(run)
    (run.checkpoints / "step-1-a0.json").write_text(manifest.replace("%d", str(time.time() - 90)))
    (run.checkpoints / "step-1-a0.pt").write_bytes(b"x")
    assert main(["status", run.name]) == 0
    assert f"  checkpoint: step 1{age}" in capfd.readouterr().out


def test_a_running_run_shows_its_losses_and_when_each_rank_last_wrote(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(runs_dir)
    train(run, steps=8)
    attempt = start_attempt(run)
    attempt.stdout(1).write_text("step 8\n")
    os.utime(attempt.stdout(1), (0.0, time.time() - 90))
    assert main(["status", "-o", "json"]) == 0
    state = json.loads(capfd.readouterr().out)
    assert state["progress"]["losses"] == [2.0 / step for step in range(1, 9)]
    ages = [rank["last_output"] and round(time.time() - rank["last_output"]) for rank in state["ranks"]]
    assert ages[0] is None
    assert 90 <= ages[1] < 120
    assert main(["status"]) == 0
    text = capfd.readouterr().out
    assert "  loss \u2588\u2584\u2583\u2582\u2582\u2581\u2581\u2581 2 to 0.25\n" in text
    assert re.search(r"OUTPUT .*\n.* - .*\n.* (90s|1m30s|1m 30s) ago", text), text


def test_a_running_run_shows_what_its_ranks_use_and_marks_the_one_that_the_others_wait_for(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(runs_dir)
    attempt = start_attempt(run)
    straggler = Straggler(rank=1, host="gpu02", late_s=0.0412, period_s=0.13)
    ranks = (
        RankUsage(rank=0, cpu=1.02, memory=3 << 30, step=812, step_s=0.0891),
        RankUsage(rank=1, cpu=0.5, memory=2 << 30, gpu=0.97, gpu_memory=70 << 30, step=812, step_s=0.13, late_s=0.0412),
    )
    write_usage(attempt, UsageReport(time=time.time(), ranks=ranks, period_s=0.13, stragglers=(straggler,)))
    assert main(["status"]) == 0
    text = capfd.readouterr().out
    waits = "rank 1 on gpu02 is a straggler: the others wait 41.2 ms of each step of 130 ms (32%)"
    assert f"  warning: {waits}\n" in text
    title, first, second = [line for line in text.splitlines() if line.startswith("  RANK") or "RUNNING  " in line][-3:]
    assert re.search(r"STEP +MS/STEP +CPU +MEMORY +GPU +GPU MEMORY", title)
    assert re.search(r"812 +89.1 +1.0 +3.0 GiB +- +-", first)
    assert re.search(r"812 +130 slow +0.5 +2.0 GiB +97% +70 GiB", second)
    assert main(["status", "-o", "json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert [rank["straggler"] for rank in status["ranks"]] == [False, True]
    usage = status["ranks"][1]["usage"]
    assert (usage["gpu"], usage["late_s"], status["warning"]) == (0.97, 0.0412, waits)
    assert main(["report", "--out", "-"]) == 0
    page = re.sub("<[^>]*>", " ", capfd.readouterr().out)
    assert re.search(
        r"ms a step +cores +memory +GPU .* 89.1 +1.0 +3.0 GiB +- .* 130 slow +0.5 +2.0 GiB +97%", page, re.DOTALL
    )
    assert waits in page
    write_end(attempt, AttemptEnd(outcome="COMPLETED", reason="all ranks ended with exit code 0"))
    assert main(["status"]) == 0
    assert "MS/STEP" not in capfd.readouterr().out


def test_a_program_without_checkpoints_is_repeated(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    train(run, steps=100)
    complete(run, start_attempt(run))
    assert main(["status"]) == 0
    assert capfd.readouterr().out.endswith(f"  repeat     clusterddp submit {run.name}\n")


@pytest.mark.parametrize(
    ("arguments", "asked"), [(["--save"], "was asked to stop"), ([], "was asked to end")], ids=["save", "plain"]
)
def test_an_interrupted_cancel_says_what_goes_on(runs_dir: Path, arguments: list[str], asked: str) -> None:
    run, other = make_run(runs_dir, "one-1"), make_run(runs_dir, "two-2")
    attempt = start_attempt(run)
    argv = [sys.executable, "-m", "clusterddp", "cancel", *arguments, run.name, other.name]
    with subprocess.Popen(["sleep", "60"]) as supervisor:
        # A cancel that is not interrupted kills the supervisor; that must not be this test.
        identity = {"supervisor": dataclasses.asdict(ProcessIdentity.of(supervisor.pid))}
        write_json(attempt.start, json.loads(attempt.start.read_text()) | identity)
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        while not (run.events.exists() and "_requested" in run.events.read_text()):
            time.sleep(0.02)
        time.sleep(0.5)  # until it waits
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        supervisor.kill()
    assert process.returncode == 130
    last = err.splitlines()[-1]
    assert last == f"one-1 {asked}, and does so without this command; clusterddp status shows it; not cancelled: two-2"
