"""The command with real runs: four ranks of a script without torch on two nodes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from clusterddp.run.cleanup import end_processes, find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.record import read_run
from clusterddp.system.files import read_json, read_jsonl
from tests.support.waiting import PATIENCE

SCRIPT = """\
import os, sys, time
rank = os.environ["RANK"]
print(f"rank {rank} of", os.environ["WORLD_SIZE"], flush=True)
print(f"\\033[31mwarning from {rank}\\033[0m", file=sys.stderr, flush=True)
time.sleep(float(sys.argv[1]))
if rank == sys.argv[2]:
    raise ValueError("the loss is nan")
"""
SPEC = """\
name: script
resources: {nodes: 2, procs_per_node: 2}
entry: {script: train.py, args: ["0", none]}
"""
FAILS = 'entry.args=["0", "3"]'
ZERO_FAILS = 'entry.args=["0", "0"]'
LASTS = 'entry.args=["60", none]'
INTERRUPTED = """\
import signal, sys, time
from clusterddp.__main__ import start

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "clusterddp.spec.load":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass
            time.sleep({lasts_s})

sys.meta_path.insert(0, Finder())
sys.exit(start())
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a spec and a script; whatever is started in it does not outlive the test."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(SPEC)
    yield tmp_path
    for run in list_runs(tmp_path / "runs"):
        end_processes(f"{read_run(run).token}.", timeout_s=5)


def clusterddp(place: Path, *arguments: str, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE * timeout_s,
        check=False,
        **options,
    )


def newest(place: Path) -> RunDir:
    return list_runs(place / "runs")[-1]


def gone_soon(run: RunDir) -> bool:
    """Say whether no process of the run is left, or will be within a moment."""
    deadline = time.monotonic() + PATIENCE * 3
    while time.monotonic() < deadline:
        if not find_processes(f"{read_run(run).token}."):
            return True
        time.sleep(0.05)
    return False


def wait_for_ranks(place: Path) -> str:
    """Wait until every rank has said something; return the run's name."""
    deadline = time.monotonic() + PATIENCE * 30
    while time.monotonic() < deadline:
        for run in list_runs(place / "runs"):
            logs = [run.attempt(0).stderr(rank) for rank in range(4)]
            if all(log.exists() and log.stat().st_size for log in logs):
                return run.name
        time.sleep(0.05)
    pytest.fail("the ranks did not start")


def test_submit_and_wait_for_a_run_that_completes(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", "--wait", "-o", "json")
    assert done.returncode == 0
    submitted = json.loads(done.stdout)
    assert list(submitted) == ["schema", "run", "launcher", "job_id", "run_dir"]
    assert submitted["run_dir"] == str(place / "runs" / submitted["run"])
    assert f"{submitted['run']} COMPLETED" in done.stderr
    status = json.loads(clusterddp(place, "status", "-o", "json").stdout)
    assert (status["state"], status["job_id"]) == ("COMPLETED", submitted["job_id"])
    assert [(rank["node_rank"], rank["local_rank"], rank["state"]) for rank in status["ranks"]] == [
        (0, 0, "COMPLETED"),
        (0, 1, "COMPLETED"),
        (1, 0, "COMPLETED"),
        (1, 1, "COMPLETED"),
    ]
    lines = clusterddp(place, "logs", "--rank", "all").stdout.splitlines()
    assert [line.partition("] ")[2] for line in lines if "of 4" in line] == [f"rank {rank} of 4" for rank in range(4)]


def test_stdout_of_submit_is_the_name_of_the_run(place: Path) -> None:
    done = clusterddp(place, "submit", "-", input=SPEC)
    assert done.stdout == newest(place).name + "\n"
    assert f"clusterddp logs -f {newest(place).name}" in done.stderr
    assert clusterddp(place, "wait", done.stdout.strip()).returncode == 0


def test_a_run_that_fails_is_reported_with_exit_code_five(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", FAILS, "--wait")
    assert done.returncode == 5
    assert "rank 3 on" in done.stderr
    assert "ValueError: the loss is nan" in done.stderr
    assert f"clusterddp logs {newest(place).name} --rank 3" in done.stderr
    cause = json.loads(clusterddp(place, "status", "-o", "json").stdout)["root_cause"]
    assert (cause["rank"], cause["exit_code"]) == (3, 1)
    assert (newest(place).path / cause["log"]).is_file()
    assert "ValueError: the loss is nan" in clusterddp(place, "logs", "--rank", "failed").stdout


def test_cancel_from_elsewhere_ends_the_run_twice_is_harmless(place: Path) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "submit", "job.yaml", LASTS, "--wait"],
        cwd=place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    name = wait_for_ranks(place)
    first = clusterddp(place, "cancel", name)
    assert (first.returncode, first.stderr) == (0, f"{name}: cancelled\n")
    assert waiting.wait(20) == 6
    assert clusterddp(place, "cancel", name).returncode == 0
    assert gone_soon(newest(place))


def test_cancel_goes_on_after_a_name_that_is_none(place: Path) -> None:
    clusterddp(place, "submit", "job.yaml", LASTS)
    name = wait_for_ranks(place)
    done = clusterddp(place, "cancel", "nobody", name)
    assert done.returncode == 4
    assert "error: no run named nobody in" in done.stderr
    assert f"{name}: cancelled" in done.stderr


def test_following_shows_rank_zero_and_exits_with_how_the_run_ended(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", ZERO_FAILS, "-f")
    assert done.returncode == 5
    assert done.stdout.splitlines()[:2] == [newest(place).name, "rank 0 of 4"]


def test_json_stays_alone_on_stdout_while_following(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", "-f", "-o", "json")
    assert json.loads(done.stdout)["run"] == newest(place).name
    assert "rank 0 of 4\n" in done.stderr


def test_ctrl_c_does_not_stop_the_run_and_prints_how_to_cancel(place: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "clusterddp", "submit", "job.yaml", LASTS, "--follow"],
        cwd=str(place),
        encoding="utf-8",
        timeout=30,
        env=os.environ | {"TERM": "xterm-256color", "NO_COLOR": "1"},
    )
    child.expect("submitted ([a-z0-9-]+)")
    name = child.match.group(1)
    child.expect("rank 0 of 4")
    child.expect_exact("\\x1b[31mwarning from 0\\x1b[0m")  # escaped, for this is a terminal
    child.sendintr()
    child.expect_exact(f"detached; the run goes on. cancel: clusterddp cancel {name}")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert json.loads(clusterddp(place, "status", "-o", "json").stdout)["state"] == "RUNNING"
    assert clusterddp(place, "cancel", name).returncode == 0


@pytest.mark.parametrize("lasts_s", [0, 60])
def test_ctrl_c_is_not_lost_in_an_import_that_drops_exceptions_or_lasts(place: Path, lasts_s: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(lasts_s=lasts_s), "submit", "job.yaml"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 30,
        check=False,
    )
    assert (done.returncode, list_runs(place / "runs")) == (130, []), done.stderr


def test_a_bar_is_drawn_on_a_terminal_and_lines_elsewhere(place: Path) -> None:
    clusterddp(place, "submit", "job.yaml", LASTS)
    name = wait_for_ranks(place)
    child = pexpect.spawn(
        sys.executable,
        ["-m", "clusterddp", "wait", name],
        cwd=str(place),
        encoding="utf-8",
        timeout=30,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    child.expect("RUNNING")
    child.expect("\x1b\\[2K")  # a line that is drawn again
    child.sendintr()
    child.expect("detached")
    child.expect(pexpect.EOF)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "wait", name], cwd=place, stderr=subprocess.PIPE, text=True
    )
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == f"{name} RUNNING\n"
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(20) == 130


def test_a_run_that_is_submitted_again_is_a_new_run_that_names_the_old_one(place: Path) -> None:
    first = clusterddp(place, "submit", "job.yaml", FAILS, "--wait").stdout.strip()
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    done = clusterddp(
        elsewhere,
        "submit",
        str(place / "runs" / first),
        'entry.args=["0", none]',
        "--runs",
        str(place / "runs"),
        "--wait",
    )
    assert (done.returncode, newest(place).name) == (0, done.stdout.strip())
    assert read_run(newest(place)).parent == first


def test_a_dry_run_shows_all_and_does_nothing(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", "resources.nodes=3", "-n", "-v")
    assert done.returncode == 0
    assert done.stderr == ""
    assert not (place / "runs").exists()
    for words in (
        "3 nodes x 2 = 6 ranks",
        "resources.nodes",
        "command line",
        "WORLD_SIZE",
        "clusterddp.node.supervisor",
    ):
        assert words in done.stdout


def test_a_dry_run_as_json_is_the_plan_without_its_token(place: Path) -> None:
    plan = json.loads(clusterddp(place, "submit", "job.yaml", "-n", "-o", "json").stdout)
    assert plan["rank0"]["WORLD_SIZE"]["value"] == "4"
    assert set(plan["token"]) == {"*"}
    assert plan["gang"]["token"] == plan["token"]
    assert plan["rank0"]["CLUSTERDDP_COOKIE"]["value"].startswith("*")


def test_a_wrong_spec_is_reported_line_by_line_with_exit_code_two(place: Path) -> None:
    (place / "bad.yaml").write_text("name: bad\nresurces: {nodes: 2}\n")
    done = clusterddp(place, "submit", "bad.yaml", "train.epochs=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.yaml:2:1" in done.stderr
    assert 'Did you mean "resources"?' in done.stderr
    assert "train.epochs" in done.stderr
    assert not (place / "runs").exists()


def test_the_run_keeps_the_spec_as_resolved(place: Path) -> None:
    clusterddp(place, "submit", "job.yaml", "restarts=2", "--wait")
    plan = read_json(newest(place).plan)
    assert plan is not None
    assert plan["spec"]["restarts"] == 2
    assert "restarts: 2" in newest(place).spec.read_text()


@pytest.mark.slow
def test_the_demo_learns_and_prints_what_is_next(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = clusterddp(tmp_path, "demo", timeout_s=160)
    assert done.returncode == 0, done.stderr
    assert "unseen images classified correctly" in done.stderr
    assert "clusterddp init" in done.stderr
    summary = read_json(newest(tmp_path).summary)
    assert summary is not None
    assert summary["accuracy"] >= 0.95


def test_ctrl_c_in_the_demo_ends_its_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    demo = subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "demo"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert demo.stderr is not None
    assert "ranks on this machine learn" in demo.stderr.readline()
    # In the middle of an import Python may end by the signal itself, which only a shell sees as 130.
    demo.stderr.readline()
    demo.send_signal(signal.SIGINT)
    err = demo.stderr.read()
    assert demo.wait(30) == 130, err
    assert f"{newest(tmp_path).name}: cancelled" in err
    assert gone_soon(newest(tmp_path))


def test_resume_is_the_next_attempt_of_the_same_run(place: Path) -> None:
    name = clusterddp(place, "submit", "job.yaml", FAILS, "--wait").stdout.strip()
    done = clusterddp(place, "resume", name, "--wait", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["run"]) == (5, name)
    assert json.loads(clusterddp(place, "status", "-o", "json").stdout)["attempt"] == 1


SIZES = {
    2: ("resources.nodes=2",),
    3: ("resources.nodes=3",),
    4: ("resources.nodes=1", "resources.procs_per_node=4"),
    1: ("resources.procs_per_node=1",),
}
"""Ranks -> what brings them about, one after the other."""


@pytest.mark.slow
def test_a_training_goes_on_with_other_numbers_of_ranks(place: Path) -> None:
    train = "{samples: 250, model: fastnet, width: 0.125, epochs: 9999, batch_size: 5, lr: 0.1, log_every: 1}"
    (place / "train.yaml").write_text(f"name: a\ndevice: cpu\nresources: {{nodes: 4}}\ntrain: {train}\n")
    name = clusterddp(place, "submit", "train.yaml").stdout.strip()
    run = newest(place)
    for attempt, (ranks, sizes) in enumerate(SIZES.items()):
        wait_for_metrics(run, attempt)
        assert clusterddp(place, "cancel", "--save", name).returncode == 0
        clusterddp(place, "wait", name)
        rest = [f"train.epochs={list(read_jsonl(run.metrics))[-1]['epoch'] + 1}"] if ranks == 1 else []
        done = clusterddp(place, "resume", name, *sizes, *rest)
        assert done.returncode == 0, done.stderr
        assert ("a step still has 20 images" in done.stderr) == (ranks != 3), done.stderr
    assert clusterddp(place, "wait", name).returncode == 0
    summary = read_json(run.summary)
    assert summary is not None
    rows = [row for row in read_jsonl(run.metrics) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, summary["steps"] + 1))
    per_epoch = Counter(row["epoch"] for row in rows)
    assert sorted(per_epoch) == list(range(1, summary["epochs"] + 1))
    assert summary["epochs"] * (250 - 20) <= summary["samples"] <= summary["epochs"] * 250


def wait_for_metrics(run: RunDir, attempt: int) -> None:
    deadline = time.monotonic() + PATIENCE * 60
    while not any(row["attempt"] == attempt for row in read_jsonl(run.metrics)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_following_prints_a_restart(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", ZERO_FAILS, "restarts=1", "-f")
    assert done.returncode == 5
    assert done.stdout.splitlines().count("rank 0 of 4") == 2
    assert f"attempt 1 of {newest(place).name} starts\n" in done.stderr


def test_wait_and_cancel_answer_in_json_too(place: Path) -> None:
    name = clusterddp(place, "submit", "job.yaml", FAILS).stdout.strip()
    done = clusterddp(place, "wait", name, "-o", "json")
    status = json.loads(done.stdout)
    assert (done.returncode, status["schema"], status["run"], status["state"]) == (5, 1, name, "FAILED")
    cancelled = json.loads(clusterddp(place, "cancel", name, "nobody", "-o", "json").stdout)
    assert [(each["run"], each["error"] is None) for each in cancelled["runs"]] == [(name, True), ("nobody", False)]
    assert cancelled["runs"][0]["result"].startswith("has already ended: FAILED")


def test_supervisors_note_when_lines_were_written(place: Path) -> None:
    assert clusterddp(place, "submit", "job.yaml", 'entry.args=["6", none]', "--wait").returncode == 0
    notes = [path.name for path in newest(place).attempt(0).logs.glob("*.times")]
    assert sorted(notes) == ["node-000.times", "node-001.times"]
    now = time.time()
    lines = clusterddp(place, "logs", "--rank", "all", "--timestamps", "--since", "2m").stdout.splitlines()
    assert len(lines) == 8
    for line in lines:
        written = time.mktime(time.strptime(line.split()[0], "%Y-%m-%dT%H:%M:%S"))
        assert now - PATIENCE * 60 < written <= now
    assert clusterddp(place, "logs", "--rank", "all", "--grep", "rank 3 of").stdout.endswith("rank 3 of 4\n")


def on_terminal(place: Path, *arguments: str) -> pexpect.spawn[str]:
    environ = os.environ | {"TERM": "xterm-256color", "NO_COLOR": "1"}
    words = ["-m", "clusterddp", *arguments]
    return pexpect.spawn(sys.executable, words, cwd=str(place), encoding="utf-8", timeout=60, env=environ)


def states(place: Path) -> dict[str, str]:
    return {run["name"]: run["state"] for run in json.loads(clusterddp(place, "list", "-o", "json").stdout)}


def test_cancel_all_asks_first_and_cancel_by_name_ends_the_runs_of_that_spec(place: Path) -> None:
    assert clusterddp(place, "submit", "job.yaml", "name=done", "--wait").returncode == 0
    for name in ("one", "two"):
        assert clusterddp(place, "submit", "job.yaml", f"name={name}", LASTS).returncode == 0
    asked = clusterddp(place, "cancel", "--all", stdin=subprocess.DEVNULL)
    assert (asked.returncode, "hint: --yes" in asked.stderr) == (2, True)
    assert clusterddp(place, "cancel", "--name", "one").returncode == 0
    assert states(place) == {"done": "COMPLETED", "one": "CANCELLED", "two": "RUNNING"}
    for answer, state in (("n", "RUNNING"), ("y", "CANCELLED")):
        child = on_terminal(place, "cancel", "--all")
        child.expect_exact("Cancel them? [y/N]: ")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        assert states(place)["two"] == state


def test_import_says_each_remark_once_on_a_terminal(place: Path) -> None:
    (place / "train.slurm").write_text("#!/bin/bash\n#SBATCH --nodes=2\ncp data $TMPDIR\nsrun python train.py\n")
    child = on_terminal(place, "import", "train.slurm")
    assert child.read().count("cp data $TMPDIR") == 1
    done = clusterddp(place, "import", "train.slurm")
    assert ("cp data $TMPDIR" in done.stdout, "cp data $TMPDIR" in done.stderr) == (True, True)
