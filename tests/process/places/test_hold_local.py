"""A hold on this machine: real runs; the GPUs are those of a fake nvidia-smi on PATH."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.cleanup import end_processes, find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import read_run
from tests.support.fake_gpus import FakeGpus
from tests.support.person import Person
from tests.support.waiting import wait_until

SPEC = """
name: job
network: {backend: gloo}
resources: {nodes: 1, gpus_per_node: 2}
snapshot: false
entry: {script: entry.py, args: [forever]}
"""
UNTIL_STOP = """
import os, sys, time
print("GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
while sys.argv[1] == "forever" and not os.path.exists(os.environ["CLUSTERDDP_STOP_FILE"]):
    time.sleep(0.05)
"""
BRIEF = "entry.args=[once]"
ONE_GPU = "resources.gpus_per_node=1"
ON_CPU = ("--cpu", "~resources.gpus_per_node", "resources.procs_per_node=1")


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Person]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / "entry.py").write_text(UNTIL_STOP)
    person = Person(path=tmp_path, environ=FakeGpus(tmp_path / "bin", count=3).environ)
    yield person
    for run in list_runs(person.runs_dir):
        end_processes(f"{read_run(run).token}.", timeout_s=5)


def started(person: Person, *words: str) -> RunDir:
    done = person.clusterddp(words[0], "job.yaml", *words[1:], "-o", "json")
    return find_run(person.runs_dir, json.loads(done.stdout)["run"])


def refused(person: Person, *words: str) -> str:
    done = person.clusterddp(words[0], "job.yaml", *words[1:], check=False)
    assert done.returncode == 3, (done.returncode, done.stderr)
    return done.stderr


def gpus_of(run: RunDir) -> str:
    stdout = run.newest_attempt().stdout(0)
    wait_until(lambda: stdout.exists() and stdout.read_text().endswith("\n"), 40)
    return stdout.read_text().strip()


def test_runs_in_a_hold_have_its_gpus_and_others_do_not_until_it_is_cancelled(person: Person) -> None:
    kept = started(person, "hold", "--for", "1h")
    assert gpus_of(started(person, "submit", ONE_GPU)) == "GPU 2"  # the third one is in no hold
    run = started(person, "submit", "--in", kept.name, BRIEF, "--wait")
    assert (person.end(run).outcome, gpus_of(run)) == ("COMPLETED", "GPU 0,1")
    assert f"GPUs 0 and 1: run {kept.name}" in refused(person, "submit", ONE_GPU)
    first = started(person, "submit", "--in", kept.name, ONE_GPU)
    second = started(person, "submit", "--in", kept.name, ONE_GPU)
    assert {gpus_of(first), gpus_of(second)} == {"GPU 0", "GPU 1"}
    assert f"GPU 2: not in hold {kept.name}" in refused(person, "submit", "--in", kept.name, ONE_GPU)
    state = person.status(kept)
    assert (state["state"], state["hold"], state["held"]) == ("RUNNING", kept.name, [first.name, second.name])
    plan = person.clusterddp("submit", "job.yaml", "--in", kept.name, ONE_GPU, "-n", check=False).stderr
    assert f"run {first.name}" in plan
    person.clusterddp("cancel", kept.name)
    assert {person.end(each).outcome for each in (kept, first, second)} == {"CANCELLED"}
    assert person.end(started(person, "submit", BRIEF, "--wait")).outcome == "COMPLETED"


def test_a_hold_ends_when_its_time_is_over_and_stops_its_run_which_goes_on_without_it(person: Person) -> None:
    kept = started(person, "hold", "resources.time=0:00:12")
    run = started(person, "submit", "--in", kept.name)
    person.clusterddp("status", kept.name)
    wait_until(lambda: person.end(run) is not None and person.end(kept) is not None, 40)
    assert (person.end(run).outcome, person.end(kept).outcome) == ("STOPPED", "COMPLETED")
    person.clusterddp("resume", run.name)
    assert (read_run(run).hold, gpus_of(run)) == (None, "GPU 0,1")
    ended = person.clusterddp("submit", "job.yaml", "--in", kept.name, check=False)
    assert (ended.returncode, f"hold {kept.name} has ended" in ended.stderr) == (2, True)


def test_the_gpus_of_a_killed_hold_are_free_once_no_run_is_in_it(person: Person) -> None:
    kept = started(person, "hold")
    run = started(person, "submit", "--in", kept.name)
    gpus_of(run)
    for process in find_processes(f"{read_run(kept).token}."):
        with contextlib.suppress(ProcessLookupError):  # it dies with one that was killed before it
            os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not find_processes(f"{read_run(kept).token}."))
    assert f"GPUs 0 and 1: run {run.name}" in refused(person, "submit")
    assert f"hold {kept.name} has ended" in refused(person, "submit", "--in", kept.name)
    person.clusterddp("cancel", run.name)
    assert person.end(started(person, "submit", BRIEF, "--wait")).outcome == "COMPLETED"


def test_a_hold_without_gpus_keeps_other_holds_away_and_has_one_run(person: Person) -> None:
    kept = started(person, "hold", *ON_CPU)
    assert f"run {kept.name}" in refused(person, "hold", *ON_CPU)
    run = started(person, "submit", *ON_CPU, "--in", kept.name)
    assert f"run {run.name}" in refused(person, "submit", *ON_CPU, "--in", kept.name)
    person.clusterddp("cancel", run.name)
    again = started(person, "submit", *ON_CPU, "--in", kept.name, BRIEF, "--wait")
    assert person.end(again).outcome == "COMPLETED"
    person.clusterddp("cancel", "--save", kept.name)
    assert person.end(kept).outcome == "STOPPED"
