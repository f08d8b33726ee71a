"""One table: what the records of a run and the answer of its place make of its state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempts import AttemptEnd
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity, RunRecord
from clusterddp.run.state import Answer, Records, RunState, derive_state

RUN = RunDir(Path("/runs/brisk-otter-3"))
HERE = dataclasses.asdict(ProcessIdentity.of())
GONE = HERE | {"started": -5.0}
ELSEWHERE = HERE | {"host": "laptop"}
RESTARTS = AttemptEnd(outcome="FAILED", reason="rank 1 failed", will_restart=True)

SUBMITTING: dict[str, Any] = {"submitter": HERE}
UNSUBMITTED: dict[str, Any] = {"submitter": GONE}
SUBMITTED: dict[str, Any] = {"submitter": GONE, "job_id": "7"}
STARTED = SUBMITTED | {"is_started": True, "is_claimed": True}
CLAIMED = SUBMITTED | {"is_claimed": True}
RESTART = SUBMITTED | {"is_restart": True}
ENDED = STARTED | {"end": RESTARTS}
QUEUED = SUBMITTING | {"queued": True}
ON_LAPTOP: dict[str, Any] = {"submitter": ELSEWHERE}
NEXT = SUBMITTED | {"job_tag": "tag", "number": 2}
"""A resume has made attempt 2; the record names the job of attempt 0 still."""

ALIVE, WAITS = Answer(life="alive"), Answer(life="queued", words="job 7 waits")
LEFT = Answer(life="ended", words="its processes are gone")
NO_END = "its processes are gone, and no process recorded how the run ended"
NO_SUBMITTER = "was never started: the process that submitted it is gone"


def read(number: int = 0, **facts: Any) -> Records:
    """Make records; the facts are of them or of `run.json`."""
    plain: dict[str, Any] = {"run": RUN.name, "token": "0", "name": "job", "launcher": "ssh", "created_ns": 1}
    of_record = {field.name for field in dataclasses.fields(RunRecord)}
    record = RunRecord(**plain | {key: value for key, value in facts.items() if key in of_record})
    none = {"end": None, "start": None, "is_started": False, "is_claimed": False, "is_restart": False}
    rest = none | {key: value for key, value in facts.items() if key not in of_record}
    return Records(run=RUN, record=record, attempt=RUN.attempt(number), **rest)


@pytest.mark.parametrize(
    ("records", "answer", "state", "reason"),
    [
        (SUBMITTED, ALIVE, "PENDING", "starting"),
        (STARTED, ALIVE, "RUNNING", "runs"),
        (STARTED, Answer(life="alive", words="job 7 runs"), "RUNNING", "job 7 runs"),
        (STARTED, Answer(life="alive", notes=("gpu02 is away",)), "RUNNING", "runs; gpu02 is away"),
        (RESTART, ALIVE, "REQUEUED", "starting"),
        (RESTART | {"is_started": True}, ALIVE, "RUNNING", "runs"),
        (ENDED, ALIVE, "REQUEUED", "restarts after: rank 1 failed"),
        (SUBMITTED, WAITS, "PENDING", "job 7 waits"),
        (CLAIMED, WAITS, "REQUEUED", "job 7 waits"),
        (STARTED, WAITS, "REQUEUED", "job 7 waits"),
        (RESTART, WAITS, "REQUEUED", "job 7 waits"),
        (ENDED, WAITS, "REQUEUED", "restarts after: rank 1 failed; job 7 waits"),
        (STARTED, Answer(life="unknown", words="gpu01 is away"), "UNKNOWN", "gpu01 is away"),
        (ENDED, Answer(life="unknown", words="gpu01 is away"), "UNKNOWN", "gpu01 is away"),
        (STARTED, LEFT, "LOST", NO_END),
        (STARTED, dataclasses.replace(LEFT, notes=("2 are left",)), "LOST", f"{NO_END}; 2 are left"),
        (SUBMITTED, LEFT, "LOST", "its processes are gone, and no rank was started"),
        (ENDED, LEFT, "LOST", "should have restarted after: rank 1 failed; its processes are gone"),
        (STARTED, Answer(life="ended", words="its time was up", outcome=RunState.FAILED), "FAILED", "its time was up"),
        (ENDED, Answer(life="ended", words="scancel", outcome=RunState.CANCELLED), "CANCELLED", "scancel"),
        (STARTED, Answer(life="ended", end=AttemptEnd(outcome="COMPLETED", reason="all 0")), "COMPLETED", "all 0"),
        (SUBMITTING, LEFT, "PENDING", "is being submitted"),
        (SUBMITTING | {"is_restart": True}, LEFT, "REQUEUED", "is being submitted"),
        (UNSUBMITTED, LEFT, "LOST", NO_SUBMITTER),
        (UNSUBMITTED, dataclasses.replace(LEFT, quiet_s=1.0), "PENDING", "is being submitted"),
        (UNSUBMITTED, dataclasses.replace(LEFT, quiet_s=9.0), "LOST", NO_SUBMITTER),
        (NEXT, dataclasses.replace(LEFT, quiet_s=1.0), "PENDING", "is being submitted"),
        (NEXT, dataclasses.replace(LEFT, quiet_s=9.0), "LOST", NO_SUBMITTER),
        (ON_LAPTOP, LEFT, "UNKNOWN", "is being submitted on laptop, which cannot be asked from here"),
        (ON_LAPTOP, dataclasses.replace(LEFT, quiet_s=99.0), "PENDING", "is being submitted on laptop"),
        (
            ON_LAPTOP,
            dataclasses.replace(LEFT, quiet_s=400.0),
            "LOST",
            "was never started: the process that submitted it is no longer active on laptop",
        ),
        (QUEUED, Answer(life="queued", words="waits in the queue"), "PENDING", "waits in the queue"),
        (QUEUED, Answer(life="ended", words="the queue is gone"), "LOST", "was never started: the queue is gone"),
    ],
)
def test_records_and_answer_make_the_state(records: dict[str, Any], answer: Answer, state: str, reason: str) -> None:
    view = derive_state(read(**records), answer)
    assert (view.state.value, view.reason) == (state, reason)


def test_a_job_that_was_found_proves_that_the_run_was_submitted() -> None:
    """A notebook whose sbatch gave no answer may live for days after the end of the job."""
    answer = Answer(life="ended", words="job 7 ended: COMPLETED", job=object())  # type: ignore[arg-type]
    assert derive_state(read(**SUBMITTING), answer).state is RunState.LOST
