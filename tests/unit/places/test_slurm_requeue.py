"""How the batch script has its job started again: a requeue, another job, another try; Slurm's commands are scripts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from clusterddp.places.slurm.batch import Carried, JobStart, start_next_attempt
from clusterddp.places.staging import make_run
from clusterddp.run.attempts import AttemptEnd, make_attempt, read_end, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.job_tag import job_name, job_tag
from clusterddp.run.record import JobAnswer, read_run, write_job_answer, write_run
from clusterddp.system.files import read_jsonl, write_json
from tests.support.fake_slurm import Fakes, squeue_row
from tests.support.launch_runs import plan_text

SPEC = "name: job\nlauncher: slurm\nrestarts: 2\nresources: {nodes: 2}\nentry: {script: entry.py}\n"
SCONTROL = """\
state={state}
case "$1 $2" in
"show job") echo "JobId=7 JobName=x UserId=a(1) JobState=RUNNING Reason=None Restarts=$(cat $state/restarts)";;
"requeue 7")
    if [ -s $state/refusals ]; then
        head -n 1 $state/refusals >&2
        sed -i 1d $state/refusals
        exit 1
    fi
    echo 1 >$state/restarts;;
esac
"""


class Cluster(Fakes):
    """A cluster on which job 7 runs the first attempt of a run, which has stopped and is to go on."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(directory)
        (directory / "restarts").write_text("0")
        self.do("scontrol", SCONTROL.format(state=directory))
        self.do("sbatch", "echo 8")
        place = directory / "place"
        place.mkdir()
        (place / "entry.py").write_text("")
        plan = make_run(plan_text(SPEC, place, environ={}), {})
        self.run = RunDir(plan.run_dir)
        self.token = plan.token
        write_job_answer(self.run, job_tag(self.token, 0), JobAnswer(job_id="7"))
        self.attempt = self.run.attempts()[0]
        stop = AttemptEnd(outcome="STOPPED", reason="time limit", will_restart=True, needs_job=True)
        write_end(self.attempt, stop)

    def refuse(self, *words: str) -> None:
        """Refuse as many requeues, in these words."""
        (self.directory / "refusals").write_text("".join(f"{line}\n" for line in words))

    def go_on(self) -> str:
        name = job_name("job", job_tag(self.token, 0))
        carried = Carried(
            run=self.run,
            record=read_run(self.run),
            start=JobStart(job_id="7", name=name, restart_count=0, host="node1"),
            restarts=2,
            srun=("srun",),
            environment={"PATH": f"{self.directory}:{os.defpath}"},
        )
        return start_next_attempt(carried, self.attempt)

    @property
    def num_requeues(self) -> int:
        return sum(call.startswith("requeue") for call in self.calls("scontrol"))

    def events(self) -> list[str]:
        return [str(row["event"]) for row in read_jsonl(self.run.events)]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "slurm")


def test_a_job_is_requeued(cluster: Cluster) -> None:
    assert cluster.go_on() == "the same job, requeued"
    assert (cluster.num_requeues, cluster.calls("sbatch"), cluster.events()) == (1, [], ["requeued"])


@pytest.mark.parametrize("words", ["Job is pending execution", "Unable to contact slurm controller (connect failure)"])
def test_a_requeue_that_is_pending_or_without_an_answer_is_tried_again_and_no_other_job(
    cluster: Cluster, words: str
) -> None:
    cluster.refuse(words)
    assert cluster.go_on() == "the same job, requeued"
    assert (cluster.num_requeues, cluster.calls("sbatch")) == (2, [])


def test_a_requeue_that_took_effect_without_an_answer_is_not_repeated(cluster: Cluster) -> None:
    (cluster.directory / "restarts").write_text("1")
    assert cluster.go_on() == "the same job, requeued"
    assert (cluster.num_requeues, cluster.calls("sbatch")) == (0, [])


def test_a_job_that_may_not_be_requeued_is_followed_by_another(cluster: Cluster) -> None:
    cluster.refuse("Requested operation is presently disabled")
    words = "scontrol: Requested operation is presently disabled"
    assert cluster.go_on() == f"follow-up job 8 ({words})"
    record = read_run(cluster.run)
    assert (record.job_id, record.job_tag, record.job_attempt) == ("8", job_tag(cluster.token, 1), 1)
    assert cluster.events() == ["submitted", "follow_up"]


def test_a_follow_up_job_whose_answer_was_lost_is_not_submitted_twice(cluster: Cluster) -> None:
    cluster.refuse(*["Requested operation is presently disabled"] * 2)
    cluster.do("sbatch", f"cp {cluster.directory}/later {cluster.directory}/squeue.text; exit 1")
    (cluster.directory / "later").write_text(squeue_row(id="8", name=job_name("job", job_tag(cluster.token, 1))))
    assert cluster.go_on().startswith("follow-up job 8 (")
    assert (len(cluster.calls("sbatch")), read_run(cluster.run).job_id) == (1, "8")


def test_a_follow_up_job_of_an_earlier_try_is_found(cluster: Cluster) -> None:
    cluster.refuse("Requested operation is presently disabled")
    tag = job_tag(cluster.token, 1)
    write_run(cluster.run, dataclasses.replace(read_run(cluster.run), job_id=None, job_tag=tag, job_attempt=1))
    cluster.answer("squeue", squeue_row(id="8", name=job_name("job", tag)))
    assert cluster.go_on().startswith("follow-up job 8 (")
    assert (cluster.calls("sbatch"), read_run(cluster.run).job_id) == ([], "8")


def test_a_cancelled_run_is_not_started_again(cluster: Cluster) -> None:
    write_json(cluster.run.cancel_file, {"by": "ana"})
    assert cluster.go_on() == "nothing: the run was cancelled"
    assert (cluster.num_requeues, cluster.calls("sbatch")) == (0, [])
    end = read_end(cluster.run.newest_attempt())
    assert end
    assert end.outcome == "CANCELLED"


def test_an_attempt_that_another_start_of_the_job_has_made_is_left_to_it(cluster: Cluster) -> None:
    make_attempt(cluster.run, 1)
    assert cluster.go_on() == "another start of the job"
    assert (cluster.num_requeues, cluster.calls("sbatch")) == (0, [])


def test_a_run_that_can_go_on_nowhere_has_failed_and_says_why(cluster: Cluster) -> None:
    cluster.refuse("Requested operation is presently disabled")
    cluster.do("sbatch", "echo 'sbatch: error: Batch job submission failed: Access denied' >&2; exit 1")
    assert "Access denied" in cluster.go_on()
    end = read_end(cluster.run.newest_attempt())
    assert end
    assert (end.outcome, "could neither requeue the job nor submit a follow-up job" in end.reason) == ("FAILED", True)
