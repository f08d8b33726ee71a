"""The controller's answer about one job, and commands that a signal ends."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import call_slurm, read_job, run_slurm
from tests.support.waiting import wait_until

SHOWN = (
    "JobId=7 JobName=a JobState=FAILED b.0123456789abcdef0123 UserId=ana(61234) GroupId=ana(61234) MCS_label=N/A "
    "Priority=4294901758 JobState=COMPLETING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime={preempted} NodeList=node[1-2] Command=/x y Restarts=9\n"
)


def command(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


def test_a_job_is_read_whatever_its_name_and_command_contain():
    job = read_job(SHOWN.format(preempted="None"))
    assert (job.state, job.restarts) == ("COMPLETING", 2)


@pytest.mark.parametrize(("time", "expected"), [("None", False), ("2026-01-01T00:00:00", True)])
def test_a_job_that_has_a_preempt_time_is_being_preempted(time, expected):
    assert read_job(SHOWN.format(preempted=time)).preempted is expected


def test_what_is_no_job_is_an_error():
    with pytest.raises(SlurmError, match="not understood"):
        read_job("slurm_load_jobs: what?\n")


def test_a_command_that_a_signal_ended_is_no_answer_about_the_job(tmp_path):
    command(tmp_path / "scontrol", "kill -TERM $$")
    with pytest.raises(SlurmError) as caught:
        run_slurm(["scontrol", "requeue", "7"], environ={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert caught.value.transient


def test_sbatch_gets_no_more_of_the_environment_than_its_job_may_have(tmp_path):
    command(tmp_path / "sbatch", "exec env")
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/ana", "USER": "ana", "SLURM_CONF": "/etc/c",
        "SLURM_JWT": "j", "LD_LIBRARY_PATH": "/opt/slurm/lib", "API_KEY": "canary", "BASH_ENV": "/x",
        "ENV": "/y", "SLURM_JOB_ID": "7", "SBATCH_EXPORT": "NONE", "PYTHONSTARTUP": "/z", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    lines = run_slurm(["sbatch"], environ=environ).splitlines()
    given = {name for line in lines if (name := line.partition("=")[0]) not in {"PWD", "SHLVL", "_"}}
    assert given == {"PATH", "HOME", "USER", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT", "LC_ALL"}


def test_a_command_that_takes_too_long_is_quoted(tmp_path):
    command(tmp_path / "scontrol", "echo 'scontrol: error: the queue is full' >&2; printf 'and more' >&2; sleep 60")
    with pytest.raises(SlurmError, match=r"^scontrol: no answer within 1 s: the queue is full; and more$") as caught:
        run_slurm(["scontrol"], environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout_s=1)
    assert caught.value.transient


def test_what_sbatch_says_while_it_waits_is_passed_on_before_it_ends(tmp_path, capfd):
    waits = f"echo 'sbatch: the queue is full' >&2; until [ -e {tmp_path}/seen ]; do sleep 0.05; done; echo 17"
    command(tmp_path / "sbatch", waits)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(call_slurm, ["sbatch"], environ=environ, stdin="#!/bin/sh\n" * 50_000, timeout_s=30)
        try:
            wait_until(lambda: "sbatch: the queue is full\n" in capfd.readouterr().err, 20)
        finally:
            (tmp_path / "seen").touch()
    assert (answer.result().stdout, answer.result().stderr) == ("17\n", "sbatch: the queue is full\n")
    assert capfd.readouterr().err == ""


def test_a_command_that_answers_at_once_says_nothing(tmp_path, capfd):
    command(tmp_path / "sbatch", "echo 'sbatch: a word of the site' >&2; cat")
    done = call_slurm(["sbatch"], environ={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdin="x")
    assert (done.stdout, done.stderr, capfd.readouterr().err) == ("x", "sbatch: a word of the site\n", "")
