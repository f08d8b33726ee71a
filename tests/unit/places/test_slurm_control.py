"""The controller's answer about one job, and commands that a signal ends."""

import pytest

from clusterddp.errors import SlurmError
from clusterddp.places.slurm.commands import read_job, run_slurm

SHOWN = (
    "JobId=7 JobName=a JobState=FAILED b.0123456789abcdef0123 UserId=ana(61234) GroupId=ana(61234) MCS_label=N/A "
    "Priority=4294901758 JobState=COMPLETING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime={preempted} NodeList=node[1-2] Command=/x y Restarts=9\n"
)


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
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -TERM $$\n")
    (tmp_path / "scontrol").chmod(0o700)
    with pytest.raises(SlurmError) as caught:
        run_slurm(["scontrol", "requeue", "7"], environ={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert caught.value.transient


def test_sbatch_gets_no_more_of_the_environment_than_its_job_may_have(tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec env\n")
    (tmp_path / "sbatch").chmod(0o700)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/ana", "USER": "ana", "SLURM_CONF": "/etc/c",
        "SLURM_JWT": "j", "LD_LIBRARY_PATH": "/opt/slurm/lib", "API_KEY": "canary", "BASH_ENV": "/x",
        "ENV": "/y", "SLURM_JOB_ID": "7", "SBATCH_EXPORT": "NONE", "PYTHONSTARTUP": "/z", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    lines = run_slurm(["sbatch"], environ=environ).splitlines()
    given = {name for line in lines if (name := line.partition("=")[0]) not in {"PWD", "SHLVL", "_"}}
    assert given == {"PATH", "HOME", "USER", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT", "LC_ALL"}
