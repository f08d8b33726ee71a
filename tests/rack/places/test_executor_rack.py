"""Functions from Python on a real Slurm, where a map is one job array, and over SSH, where a queue starts its runs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support import notebook
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SETUP = """
import json, os, time
from concurrent import futures
import clusterddp, clusterddp.errors

scale = 10
executor = clusterddp.Executor(
    "slurm", resources={"nodes": 2, "procs_per_node": 1, "time": "0:10:00"}, device="cpu", slurm={"comment": "mine"}
)
def train(lr, pause=0):
    if lr > 1:
        raise ValueError(f"{lr} diverges")
    time.sleep(pause)
    return lr * scale, int(os.environ["RANK"]), os.environ["SLURM_ARRAY_JOB_ID"]
"""
MAP = """
runs = executor.map(train, [0.1, 0.2, 2])
first = [run.results() for run in runs[:2]]
error = runs[2].exception()
mine = {run.future(): place for place, run in enumerate(runs)}
ended = sorted(mine[future] for future in futures.as_completed(mine, timeout=60))
print(json.dumps({
    "values": [[[value, rank] for value, rank, _ in values] for values in first],
    "arrays": sorted({array for values in first for _, _, array in values}),
    "jobs": [run.job_id for run in runs],
    "states": [run.state for run in runs],
    "error": [type(error).__name__, error.rank, error.host, error.traceback.splitlines()],
    "ended": ended,
}))
"""
CANCEL = """
with executor.batch():
    short, long = executor.submit(train, 0.1), executor.submit(train, 0.1, pause=300)
short.wait()
while not long.running():
    time.sleep(0.2)
try:
    long.result(timeout=1)
except futures.TimeoutError as error:
    late = str(error)
said = long.cancel()
print(json.dumps([short.state, late, said, long.cancelled(), long.done(), type(long.exception()).__name__]))
"""


def run_python(person: SlurmPerson, code: str) -> Any:
    answer = person.rack.run(
        HEAD, [sys.executable, "-c", SETUP + code], cwd=person.path, env=person.variables(), timeout_s=240
    )
    return json.loads(answer.stdout)


@pytest.fixture
def slurm(rack: Rack, request: pytest.FixtureRequest) -> SlurmPerson:
    return SlurmPerson.at(rack, f"executor-{abs(hash(request.node.name))}")


def test_a_map_is_one_job_array_with_results_and_the_traceback_of_a_rank(slurm: SlurmPerson) -> None:
    told = run_python(slurm, MAP)
    assert told["values"] == [[[1.0, 0], [1.0, 1]], [[2.0, 0], [2.0, 1]]]
    array = told["jobs"][0].partition("_")[0]
    assert told["arrays"] == [array]
    assert told["jobs"] == [f"{array}_{task}" for task in range(3)]
    assert told["states"] == ["COMPLETED", "COMPLETED", "FAILED"]
    kind, rank, host, traceback = told["error"]
    assert (kind, traceback[-1]) == ("RankError", "ValueError: 2 diverges")
    assert rank in (0, 1)
    assert host.startswith("node")
    assert told["ended"] == [0, 1, 2]


def test_one_call_of_a_batch_is_cancelled_and_the_other_has_ended(slurm: SlurmPerson) -> None:
    short, late, said, *rest = run_python(slurm, CANCEL)
    assert short == "COMPLETED"
    assert "is RUNNING after 1 s" in late
    assert said == "cancelled"
    assert rest == [True, True, "RunCancelledError"]


OVER_SSH = """
import json
from concurrent import futures
import clusterddp

scale = 10
spec = {"name": "far", "device": "cpu", "python": "/opt/bare/bin/python", "ssh": {"hosts": ["node1", "node2"]}}
executor = clusterddp.Executor("ssh", base=spec, parallel=2)
runs = executor.map(lambda number: number * scale, [1, 2])
values = [run.results() for run in runs]
mine = [run.future() for run in runs]
print(json.dumps([values, len(list(futures.as_completed(mine, timeout=60))), runs[0].stderr(1), runs[0].state]))
"""


def test_a_map_over_ssh_brings_its_results_home(ssh_place: SshPlace) -> None:
    argv = [sys.executable, "-c", OVER_SSH]
    answer = ssh_place.rack.run(HEAD, argv, cwd=ssh_place.path, env=ssh_place.variables(), timeout_s=240)
    assert json.loads(answer.stdout) == [[[10, 10], [20, 20]], 2, "", "COMPLETED"]


def test_a_notebook_on_the_login_node_submits_to_slurm(slurm: SlurmPerson) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, str(notebook.__file__), "slurm"]
    answer = slurm.rack.run(HEAD, command, cwd=slurm.path, env=slurm.variables(), timeout_s=300)
    notebook.check_outcomes(json.loads(answer.stdout))
