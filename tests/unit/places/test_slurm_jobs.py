"""What squeue and sacct print, read; the lines are those of Slurm 22.05, recorded where no rack gives them."""

from __future__ import annotations

import time

import pytest

from clusterddp.places.slurm.explain import advise_refusal, explain_end, explain_waiting
from clusterddp.places.slurm.queue import SEPARATOR, Job, Phase, read_sacct, read_squeue, read_time
from tests.support.fake_slurm import sacct_row, squeue_row

TAG = "0123456789abcdef0123"
NOON = time.mktime((2026, 1, 2, 12, 0, 0, 0, 0, -1))


def squeue_line(name: str = f"train.{TAG}", *, job: str = "17", array: str = "17", task: str = "N/A") -> str:
    return squeue_row(id=job, array_id=array, task=task, num_nodes="2", reason="Priority", name=name)


def sacct_line(job_id: str = "17", state: str = "FAILED", *, exit_code: str = "3:0", name: str = f"train.{TAG}") -> str:
    return sacct_row(job_id=job_id, state=state, exit_code=exit_code, ended="Unknown", nodes="node[1-2]", name=name)


def job(state: str = "PENDING", reason: str = "", **changes: object) -> Job:
    facts: dict[str, object] = {"job_id": "17", "tag": TAG, "array_index": None, "partition": "gpu", "source": "squeue"}
    return Job(state=state, reason=reason, **facts | changes)  # type: ignore[arg-type]


def test_a_job_with_a_tag_is_read() -> None:
    [found] = read_squeue(squeue_line())
    assert (found.job_id, found.tag, found.array_index, found.state) == ("17", TAG, None, "PENDING")


def test_times_are_seconds_since_the_epoch() -> None:
    assert read_squeue(squeue_line())[0].submitted == NOON


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", "", "NONE", "Tomorr 12:00"])
def test_a_time_that_is_none_is_not_known(text: str) -> None:
    assert read_time(text) is None


def test_a_started_task_of_an_array_is_named_by_array_and_index() -> None:
    [found] = read_squeue(squeue_line(job="31", array="17", task="7"))
    assert (found.job_id, found.array_index) == ("17_7", 7)


@pytest.mark.parametrize("name", ["interactive", "", f"x.{TAG}y", f"{TAG[:-1]}", f"a.{TAG.upper()}", f"{TAG}."])
def test_a_name_without_a_tag_has_none(name: str) -> None:
    assert [(job.tag, job.name) for job in read_squeue(squeue_line(name))] == [("", name)]


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        (f"clusterddp brisk-otter-3 {TAG}", TAG),
        (f"mine; clusterddp brisk-otter-3 {TAG}", TAG),
        (f"a{SEPARATOR}b; clusterddp brisk-otter-3 {TAG}, paid by x", TAG),
        (f"clusterddp brisk-otter-3 {TAG}0", ""),
        (TAG, ""),
        ("", ""),
    ],
)
def test_a_job_that_was_renamed_has_its_tag_in_the_comment(comment: str, expected: str) -> None:
    for read, row in ((read_squeue, squeue_row), (read_sacct, sacct_row)):
        assert [job.tag for job in read(row(name="other", comment=comment))] == [expected]


def test_the_tag_in_the_name_counts_more_than_one_in_the_comment() -> None:
    other = "f" * 20
    [found] = read_squeue(squeue_row(name=f"train.{TAG}", comment=f"clusterddp x {other}"))
    assert found.tag == TAG


@pytest.mark.parametrize(
    "name", ["two\nlines", f"a{SEPARATOR}b", f"17{SEPARATOR}\n{SEPARATOR * 20}", "\r\x1b[2J", "\ud800"]
)
def test_the_name_of_another_users_job_confuses_nothing(name: str) -> None:
    found = read_squeue(squeue_line(name) + squeue_line() + squeue_line(name))
    assert [job.job_id for job in found if job.tag] == ["17"]


def test_the_separator_in_the_name_of_a_job_harms_nothing() -> None:
    assert read_squeue(squeue_line(f"a{SEPARATOR}b.{TAG}"))[0].tag == TAG


@pytest.mark.parametrize("text", ["", "\n\n", "CLUSTER: east\n", "slurm_load_jobs error: x\n", SEPARATOR * 13 + "\n"])
def test_lines_that_are_no_jobs_are_skipped(text: str) -> None:
    assert read_squeue(text + squeue_line() + text)[0].job_id == "17"


def test_accounting_has_the_user_who_cancelled_a_job() -> None:
    [found] = read_sacct(sacct_line(state="CANCELLED by 0"))
    assert (found.state, found.cancelled_by) == ("CANCELLED", 0)


def test_accounting_has_the_exit_code() -> None:
    assert read_sacct(sacct_line())[0].exit_code == "3:0"


@pytest.mark.parametrize("job_id", ["17_[4-60%1]", "17_[3-10,12,...]"])
def test_tasks_that_never_started_are_one_line_of_the_accounting(job_id: str) -> None:
    [found] = read_sacct(sacct_line(job_id, "CANCELLED by 0"))
    assert (found.job_id, found.array_index) == ("17", None)


ENDED = "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED BOOT_FAIL DEADLINE REVOKED"
NOT_ENDED = (
    "PENDING CONFIGURING RUNNING SUSPENDED COMPLETING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESIZING "
    "SIGNALING STAGE_OUT STOPPED RESV_DEL_HOLD"
)


@pytest.mark.parametrize("word", ENDED.split())
def test_these_words_mean_that_a_job_is_over(word: str) -> None:
    assert job(word).phase is Phase.ENDED


@pytest.mark.parametrize("word", NOT_ENDED.split())
def test_these_words_mean_that_a_job_continues(word: str) -> None:
    assert job(word).phase not in {Phase.ENDED, Phase.UNKNOWN}


def test_an_unknown_word_means_nothing() -> None:
    assert job("HIBERNATING").phase is Phase.UNKNOWN


WAITS = {
    "Resources": "job 17 waits for nodes to become free (Resources)",
    "Priority": "job 17 waits for its turn: jobs with a higher priority are before it (Priority)",
    "Dependency": "job 17 waits for a job that it depends on (Dependency)",
    "DependencyNeverSatisfied": "for ever: a job that it depends on did not end as it should have; cancel this run",
    "QOSMaxGRESPerUser": "until some of your jobs end: its QOS lets one user have only so much (GRES)",
    "QOSMaxCpuPerUserLimit": "until some of your jobs end",
    "QOSMaxWallDurationPerJobLimit": "for ever: it asks for more than its QOS lets one job have",
    "QOSMaxJobsPerUserLimit": "until some of your jobs end",
    "QOSGrpGRES": "until other jobs end: a limit of its QOS is reached",
    "AssocGrpGRES": "until other jobs of the account end",
    "AssocMaxJobsLimit": "until some of your jobs end",
    "AssocMaxWallDurationPerJobLimit": "for ever: it asks for more than your account lets one job have",
    "ReqNodeNotAvail, UnavailableNodes:Gpu_[1-3],b7": "down, drained or reserved: Gpu_[1-3],b7",
    "ReqNodeNotAvail, UnavailableNodes:": "down, drained or reserved now, or soon",
    "ReqNodeNotAvail, May be reserved for other job": "down, drained or reserved now, or soon",
    "PartitionTimeLimit": "for ever: it asks for more time than its partition gpu allows; lower resources.time",
    "PartitionNodeLimit": "for ever: it asks for more nodes than its partition gpu allows",
    "BeginTime": "until its begin time",
    "JobHeldUser": "because it is held; scontrol release 17 lets it go",
    "JobHeldAdmin": "because an administrator holds it; ask them",
    "launch failed requeued held": "the nodes must see the run's directory; then scontrol release 17 lets it go",
    "launch_failed_requeued_held": "the nodes must see the run's directory",
    "user env retrieval failed requeued held": "a shell start-up file there (~/.profile, ~/.bash_profile) ends, waits",
    "user_env_retrieval_failed_requeued_held": "mend it, then scontrol release 17 lets it go",
    "job requeued in held state": "it was queued again and is held; scontrol release 17",
    "Licenses": "for licences that others use",
    "Reservation": "for its reservation to begin",
    "NodeDown": "for a node that is down",
    "InvalidAccount": "for ever: its account is not valid",
    "InvalidQOS": "for ever: its QOS is not valid",
    "JobArrayTaskLimit": "its turn in the array",
    "": "job 17 waits for the scheduler to look at it",
    "PhaseOfTheMoon{0}": "job 17 waits for a reason of Slurm's (PhaseOfTheMoon{0})",
}


@pytest.mark.parametrize(("reason", "words"), WAITS.items())
def test_why_a_job_waits_is_a_sentence(reason: str, words: str) -> None:
    assert words in explain_waiting(job(reason=reason))


def test_slurms_own_pause_after_a_requeue_differs_from_the_users_begin_time() -> None:
    assert "Slurm's own pause" in explain_waiting(job(reason="BeginTime"), was_started=True)


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_that_is_held_after_a_requeue_has_the_command_that_releases_it(state: str) -> None:
    assert "scontrol release 17" in explain_waiting(job(state))


def test_the_start_that_slurm_expects_is_reported() -> None:
    words = explain_waiting(job(reason="Resources", started=NOON + 3600), now=NOON)
    assert words.endswith("; Slurm expects it to start at 13:00")


def test_a_start_on_another_day_is_reported_with_the_day() -> None:
    words = explain_waiting(job(reason="Resources", started=NOON + 3 * 86400), now=NOON)
    assert words.endswith("on 2026-01-05 at 12:00")


def test_a_start_that_was_expected_in_the_past_is_left_out() -> None:
    assert "expects" not in explain_waiting(job(reason="Resources", started=NOON - 1), now=NOON)


ENDS = [
    (job("TIMEOUT", "TimeLimit"), "job 17 ended: TIMEOUT, its time was up before the ranks had stopped"),
    (job("OUT_OF_MEMORY", "OutOfMemory"), "ask for more with resources.memory_gb (OutOfMemory)"),
    (job("NODE_FAIL", "NodeDown"), "job 17 ended: NODE_FAIL, a node was lost (NodeDown)"),
    (job("FAILED", "JobLaunchFailure"), "or its script was killed (JobLaunchFailure)"),
    (job("FAILED", "NonZeroExitCode", exit_code="3:0"), "job 17 ended: FAILED, exit code 3 of the job's script"),
    (job("FAILED", exit_code="0:9"), "job 17 ended: FAILED, signal 9 to the job's script"),
    (job("CANCELLED", cancelled_by=0), "job 17 was cancelled by root"),
    (job("CANCELLED", "Priority"), "job 17 was cancelled"),
    (job("CANCELLED", "DependencyNeverSatisfied"), "did not end as it should have (DependencyNeverSatisfied)"),
    (job("CANCELLED", cancelled_by=4_000_000_001), "by uid 4000000001"),
    (job("PREEMPTED"), "another job took its place, and Slurm did not queue it again"),
]


@pytest.mark.parametrize(("ended", "words"), ENDS)
def test_how_a_job_ended_is_a_sentence(ended: Job, words: str) -> None:
    assert explain_end(ended).endswith(words)


UNBEGUN = [
    (job("CANCELLED"), "cancelled before its script began, and not by clusterddp: by scancel, or by Slurm itself"),
    (job("CANCELLED", cancelled_by=0), "job 17 was cancelled by root"),
    (job("NODE_FAIL"), "NODE_FAIL: its first node was lost before the job's script began, or did not begin it"),
    (job("TIMEOUT"), "job 17 ended: TIMEOUT, its time was up before the ranks had stopped"),
]


@pytest.mark.parametrize(("ended", "words"), UNBEGUN)
def test_a_job_that_ended_before_its_script_began_says_so(ended: Job, words: str) -> None:
    assert words in explain_end(ended, began=False)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("No partition specified or system default partition", "slurm.partition=NAME"),
        ("invalid partition specified: gpu", "slurm.partition=NAME"),
        ("Invalid account or account/partition combination specified", "slurm.account=NAME"),
        ("Invalid qos specification", "slurm.qos=NAME"),
        ("Invalid generic resource (gres) specification", "slurm.gres=gpu:h100:8"),
        ("Requested node configuration is not available", "slurm.gres=gpu:h100:8"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "sacctmgr"),
        ("no answer within 120 s: Slurm temporarily unable to accept job, sleeping and retrying", "submit it later"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "resources.time"),
    ],
)
def test_a_refusal_of_sbatch_comes_with_what_to_write(words: str, advice: str) -> None:
    assert advice in str(advise_refusal(f"sbatch: Batch job submission failed: {words}"))


def test_a_refusal_without_a_known_remedy_has_no_advice() -> None:
    assert advise_refusal("sbatch: Unable to open file") is None
