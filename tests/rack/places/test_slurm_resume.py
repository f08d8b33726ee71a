"""Runs that Slurm interrupts and starts again, with real ranks: nothing is lost, and nothing is learnt twice."""

import os
import signal
from collections.abc import Iterator

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.cleanup import find_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.system.files import read_json, read_jsonl
from tests.support.slurm_runs import await_final_end, claims, make_slurm_run, start_run
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
TRAIN = """
name: job
launcher: slurm
device: cpu
restarts: 3
resources: {{nodes: 2, procs_per_node: 1{resources}}}
train:
  {{model: fastnet, width: 0.125, precision: fp32, kernels: native, samples: 320, batch_size: 16,
   epochs: {epochs}, lr: 0.2, log_every: 5}}
"""
EPOCHS = 10


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"], kill_wait_s=20)) as rack:
        yield rack


@pytest.fixture(scope="module")
def uninterrupted(cluster: Rack) -> str:
    run = make_slurm_run(cluster, "uninterrupted", text=TRAIN.format(resources="", epochs=EPOCHS))
    start_run(cluster, run)
    assert await_final_end(run, 150).outcome == "COMPLETED"
    return params(run)


def params(run: RunDir) -> str:
    summary = read_json(run.summary)
    assert summary is not None
    return str(summary["params_sha256"])


def start_training(rack: Rack, name: str, *, resources: str = "", epochs: int = EPOCHS) -> tuple[RunDir, str]:
    run = make_slurm_run(rack, name, text=TRAIN.format(resources=resources, epochs=epochs))
    return run, start_run(rack, run)


def await_step(run: RunDir, step: int) -> None:
    wait_until(lambda: any(row["step"] >= step for row in read_jsonl(run.metrics)), 120)


def outcomes(run: RunDir) -> list[str]:
    """List how the attempts ended, of failed ones why."""
    ends = [end for attempt in run.attempts() if (end := read_end(attempt))]
    return [end.outcome if end.outcome != "FAILED" else end.reason for end in ends]


def test_a_requeued_run_learns_what_an_uninterrupted_one_does(cluster, uninterrupted):
    run, job = start_training(cluster, "requeued")
    await_step(run, 10)
    cluster.run(HEAD, ["scontrol", "requeue", job])
    assert await_final_end(run, 150).outcome == "COMPLETED"
    assert (outcomes(run), claims(run)) == (["STOPPED", "COMPLETED"], [(job, 0), (job, 1)])
    assert params(run) == uninterrupted


def test_a_preempted_run_learns_what_an_uninterrupted_one_does(cluster, uninterrupted):
    run, job = start_training(cluster, "preempted")
    await_step(run, 10)
    cluster.run(HEAD, ["sbatch", "-N2", "--exclusive", "-p", "high", "-o", "/dev/null", "--wrap", "sleep 1"])
    assert await_final_end(run, 150).outcome == "COMPLETED"
    assert (outcomes(run), claims(run)) == (["STOPPED", "COMPLETED"], [(job, 0), (job, 1)])
    assert params(run) == uninterrupted


def test_a_run_whose_time_is_up_learns_what_an_uninterrupted_one_does(cluster, uninterrupted):
    run, job = start_training(cluster, "out-of-time", resources=', time: "0:01:00"')
    await_step(run, 10)
    ranks = [rank for node in (0, 1) for rank in find_processes(f"{read_run(run).token}.n{node}")]
    for rank in ranks:  # as slow as it takes
        os.kill(rank.pid, signal.SIGSTOP)
    wait_until(run.attempt(0).stop_file.exists, 90)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGCONT)
    assert await_final_end(run, 150).outcome == "COMPLETED"
    # On a slow machine a minute may be too short a second time.
    assert (outcomes(run)[0], outcomes(run)[-1]) == ("STOPPED", "COMPLETED")
    assert claims(run) == [(job, start) for start in range(len(outcomes(run)))]
    assert params(run) == uninterrupted
