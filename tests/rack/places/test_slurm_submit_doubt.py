"""Submits whose answer is lost: the job is found by its tag, is no refusal, and is never submitted twice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_person import LOST_REPLY, SlurmPerson, interrupt, lost_reply
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
SBATCH = 'exec /usr/bin/sbatch "$@"'


@pytest.fixture
def person(rack: Rack) -> Iterator[SlurmPerson]:
    person = SlurmPerson(rack=rack, checks=False, path=Path(tempfile.mkdtemp(dir=rack.dir / "shared")))
    person.write_spec()
    yield person
    rack.run(HEAD, ["scancel", "--user=root"], check=False)


@pytest.fixture
def own_person(needs_rack: None) -> Iterator[SlurmPerson]:
    """Give a person a rack whose slurmctld may be killed."""
    with running_rack(RackPlan(nodes=["node1"])) as rack:
        person = SlurmPerson(rack=rack, checks=False, path=rack.dir / "shared")
        person.write_spec(resources="{procs_per_node: 2}")
        yield person


def test_a_job_whose_answer_was_lost_is_found_and_not_submitted_again(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "job.yaml", environ=person.wrap_sbatch(lost_reply()))
    assert done.returncode == 0, done.stderr
    assert person.jobs() == [(person.record().job_id, "PENDING")]
    assert person.events() == ["adopted", "submitted"]


@pytest.mark.parametrize("when", range(1, 8))
def test_wherever_the_connection_breaks_there_is_one_job_or_an_error(person: SlurmPerson, when: int) -> None:
    wrapper = person.wrap_sbatch(LOST_REPLY.replace("when=5", f"when={when}"))
    done = person.clusterddp("submit", "job.yaml", environ=wrapper)
    assert len(person.jobs()) == (1 if done.returncode == 0 else 0), done.stderr
    assert person.status()["state"] == ("PENDING" if done.returncode == 0 else "FAILED")


def test_words_of_a_sites_wrapper_are_not_taken_for_the_jobs_number(person: SlurmPerson) -> None:
    banner = f'echo "Your job 3 uses 12 GPUs"; echo; echo 42 nodes are free; {SBATCH}'
    person.clusterddp("submit", "job.yaml", environ=person.wrap_sbatch(banner))
    assert person.jobs() == [(person.record().job_id, "PENDING")]
    assert person.events() == ["submitted"]


@pytest.mark.parametrize("noise", ["echo 41000000", "true >&1; exec >/dev/null"])
def test_an_answer_with_two_numbers_or_none_is_settled_by_the_tag(person: SlurmPerson, noise: str) -> None:
    done = person.clusterddp("submit", "job.yaml", environ=person.wrap_sbatch(f"{noise}; {SBATCH}"))
    assert done.returncode == 0, done.stderr
    assert person.jobs() == [(person.record().job_id, "PENDING")]
    assert person.events() == ["adopted", "submitted"]


def test_an_interrupted_submit_leaves_no_job_and_says_so(person: SlurmPerson) -> None:
    wrapper = person.wrap_sbatch(f'/usr/bin/sbatch "$@"; touch {person.path}/queued; sleep 60')
    process = person.start("submit", "job.yaml", environ=wrapper)
    wait_until((person.path / "queued").exists)
    interrupt(person)
    _, talk = process.communicate(timeout=240)
    assert process.returncode == 130
    [(job_id, state)] = person.jobs()
    assert state == "CANCELLED"
    end = person.end()
    assert end is not None
    assert end.outcome == "CANCELLED"
    assert end.reason == f"interrupted while it was being started; its job {job_id} was cancelled"
    assert end.reason in talk


def test_the_job_of_a_submit_that_was_killed_is_found_by_status_and_by_cancel(person: SlurmPerson) -> None:
    wrapper = person.wrap_sbatch(f'/usr/bin/sbatch "$@"; touch {person.path}/queued; sleep 60')
    process = person.start("submit", "job.yaml", environ=wrapper)
    wait_until((person.path / "queued").exists)
    person.slurm("pkill", "-KILL", "-f", "clusterddp submit job.yaml")  # the head's own processes
    process.communicate(timeout=240)
    assert person.record().job_id is None
    assert person.status()["state"] == "PENDING"
    assert person.clusterddp("cancel", "@last").returncode == 0
    assert [state for _, state in person.jobs()] == ["CANCELLED"]


def test_a_controller_that_comes_back_is_asked_again(own_person: SlurmPerson) -> None:
    """The answer is lost, and the controller dies before it can be asked for the job."""
    kill = f"{lost_reply().removeprefix('exec ')}; code=$?; pkill -KILL -x slurmctld; touch {own_person.path}/dead"
    wrapper = own_person.wrap_sbatch(f"sleep 6; {kill}; exit $code")
    own_person.slurm("true")
    process = own_person.start("submit", "job.yaml", environ=wrapper)
    wait_until((own_person.path / "dead").exists)
    own_person.slurm("slurmctld")
    _, talk = process.communicate(timeout=120)
    # A controller that is killed may forget the job: then that is said; it is never submitted twice.
    jobs = own_person.jobs()
    assert len(jobs) == (1 if process.returncode == 0 else 0), talk
    assert own_person.status()["state"] == ("PENDING" if process.returncode == 0 else "FAILED")


@pytest.mark.slow
def test_doubt_that_cannot_be_settled_is_said_and_settled_by_status_later(own_person: SlurmPerson) -> None:
    kill = f"{lost_reply().removeprefix('exec ')}; code=$?; sleep 6; pkill -KILL -x slurmctld; exit $code"
    done = own_person.clusterddp("submit", "job.yaml", environ=own_person.wrap_sbatch(kill))
    assert done.returncode == 3
    assert "it is not known whether Slurm has taken the job" in done.stderr
    assert f"clusterddp status {own_person.run_dir().name} shows it once Slurm answers" in done.stderr
    assert own_person.end() is None
    assert own_person.status()["state"] == "UNKNOWN"
    own_person.slurm("slurmctld")
    wait_until(lambda: own_person.slurm("squeue", check=False))
    assert own_person.status()["state"] == "PENDING"
    assert len(own_person.jobs()) == 1


def test_a_late_answer_of_sbatch_does_not_hide_the_follow_up_job(own_person: SlurmPerson) -> None:
    """The first job starts, loses its task and is followed by another one before sbatch has answered the submit."""
    place = own_person.path
    late = f'until grep -qs follow_up {place}/runs/*/events.jsonl; do sleep 0.1; done; echo "$said" | tee {place}/said'
    wrapper = own_person.wrap_sbatch(
        f'if ! mkdir {place}/first; then {SBATCH}; fi; said=$(/usr/bin/sbatch "$@"); {late}'
    )
    own_person.write_spec(
        "restarts: 1\nslurm: {requeue: false, no_requeue: true}", resources="{nodes: 1, procs_per_node: 2}"
    )
    (place / "entry.py").write_text(
        "import os, signal, time\n"
        "if (os.environ['CLUSTERDDP_ATTEMPT'], os.environ['RANK']) == ('0', '1'):\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        f"while not os.path.exists('{place}/done'):\n    time.sleep(0.05)\n"
    )
    done = own_person.clusterddp("submit", "job.yaml", environ=wrapper)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: own_person.status()["state"] not in {"PENDING", "REQUEUED", "UNKNOWN"}, 60)
    status = own_person.status()
    second = str(int((place / "said").read_text()) + 1)
    job_ids = (status["job_id"], own_person.record().job_id)
    assert (status["state"], *job_ids) == ("RUNNING", second, second), status["reason"]
    (place / "done").touch()
    assert own_person.clusterddp("wait").returncode == 0


def test_the_words_of_an_sbatch_that_waits_for_room_are_shown_while_it_waits(own_person: SlurmPerson) -> None:
    rack = own_person.rack
    with (rack.dir / "etc/slurm/slurm.conf").open("a") as settings:
        settings.write("MaxJobCount=3\n")
    rack.run(HEAD, ["pkill", "-KILL", "-f", "slurmctld"])
    rack.run(HEAD, ["slurmctld"])
    wait_until(lambda: rack.run(HEAD, ["squeue", "-h"], check=False).returncode == 0)
    for _ in range(3):  # the last one may have no room
        own_person.slurm("timeout", "3", "sbatch", "--hold", "--wrap=true", check=False)
    process = own_person.start("submit", "job.yaml")
    assert process.stderr
    lines = iter(process.stderr.readline, "")
    assert any("unable to accept job, sleeping and retrying" in line for line in lines)
    interrupt(own_person)
    process.communicate(timeout=60)
