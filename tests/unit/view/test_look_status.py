"""What `status` knows about a run, from files made by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.record import write_rank
from clusterddp.system.files import append_jsonl
from clusterddp.view.logs import read_log_tail
from clusterddp.view.progress import read_progress
from clusterddp.view.status import read_status
from tests.support.handmade_runs import HOST, complete, fail, make_run, rank_record, start_attempt, train

RANK_KEYS = [
    "rank",
    "node_rank",
    "local_rank",
    "host",
    "pid",
    "interface",
    "master_addr",
    "master_port",
    "state",
    "exit_code",
    "last_output",
    "usage",
    "straggler",
    "python",
]


def test_ranks_of_a_pending_run_come_from_its_plan(tmp_path: Path) -> None:
    status = read_status(make_run(tmp_path, nodes=2, per_node=2)).to_json()
    assert status["state"] == "PENDING"
    assert [(rank["rank"], rank["node_rank"], rank["local_rank"]) for rank in status["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert {(rank["pid"], rank["state"]) for rank in status["ranks"]} == {(None, "PENDING")}


def test_json_has_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fail(start_attempt(run))
    status = json.loads(json.dumps(read_status(run).to_json()))
    promised = [
        "schema",
        "run",
        "name",
        "state",
        "launcher",
        "job_id",
        "attempt",
        "created",
        "ended",
        "times",
        "hold",
        "mark",
        "world_size",
    ]
    promised += [
        "progress",
        "steps",
        "shown_step",
        "held",
        "ranks",
        "root_cause",
        "diagnosis",
        "start_phases",
        "nccl",
        "warning",
        "checkpoint",
    ]
    promised += ["stopping", "lost_rows", "nodes_changed", "hang", "last_output", "report", "effective"]
    assert [key for key in status if key != "reason"] == promised
    assert list(status["ranks"][0]) == RANK_KEYS
    assert list(status["root_cause"]) == ["rank", "host", "exit_code", "error", "log"]


def test_the_phases_of_a_start_are_those_of_the_newest_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run)
    start = json.loads(attempt.start.read_text())
    start["nodes"] = [{"node_rank": 0, "import_s": 2.5}, {"node_rank": 1, "import_s": 2.0}]
    attempt.start.write_text(json.dumps(start))
    created = read_status(run).created
    steps = {"import": 0.1, "rendezvous": 0.25, "data": 1.0, "first_step": 4.0}
    append_jsonl(run.events, {"event": "first_step", "attempt": 7, "phases": {"data": 9.0}})
    assert read_status(run).start_phases == {"import": 2.5}
    append_jsonl(run.events, {"event": "submitted", "attempt": 0, "time": created + 0.5})
    append_jsonl(run.events, {"event": "first_step", "attempt": 0, "phases": steps})
    phases = read_status(run).start_phases
    assert list(phases) == ["prepare", "launch", "import", "rendezvous", "data", "first_step"]
    assert phases["prepare"] == 0.5
    assert phases["launch"] == max(0.0, round(start["started"] - created - 0.5 - 2.5, 2))
    assert (phases["import"], phases["data"], phases["first_step"]) == (2.6, 1.0, 4.0)


def test_the_start_of_a_resumed_run_begins_with_the_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_attempt(run)
    created = read_status(run).created
    append_jsonl(run.events, {"event": "resumed", "attempt": 0, "time": created + 100.0})
    append_jsonl(run.events, {"event": "submitted", "attempt": 0, "time": created + 100.5})
    assert read_status(run).start_phases["prepare"] == 0.5


def test_rows_that_the_storage_did_not_take_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_attempt(run)
    for rows in (3, 4):
        append_jsonl(run.events, {"event": "rows_lost", "attempt": 0, "rows": rows})
    assert read_status(run).lost_rows == 7


def test_running_ranks_are_running(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_attempt(run)
    status = read_status(run)
    assert status.state.value == "RUNNING"
    assert [(rank.state, rank.pid) for rank in status.ranks] == [("RUNNING", 1000), ("RUNNING", 1001)]


def test_the_rank_that_failed_is_distinguished_from_those_that_were_ended_after_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, nodes=2)
    fail(start_attempt(run, ranks=4), rank=2, ranks=4)
    status = read_status(run)
    assert [rank.state for rank in status.ranks] == ["KILLED", "KILLED", "FAILED", "KILLED"]
    assert [rank.exit_code for rank in status.ranks] == [143, 143, 1, 143]
    assert status.root_cause is not None
    assert (status.root_cause.rank, status.root_cause.host) == (2, HOST)


def test_a_rank_without_a_recorded_end_is_lost_when_the_run_is_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run)
    write_end(attempt, AttemptEnd(outcome="FAILED", reason="the supervisor was killed"))
    assert [rank.state for rank in read_status(run).ranks] == ["LOST", "LOST"]


def test_a_rank_that_never_came_to_start_is_not_started(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start_attempt(run, ranks=1)
    write_rank(attempt, rank_record(0, exit_code=0, ended=1.0))
    write_end(attempt, AttemptEnd(outcome="CANCELLED", reason="cancelled"))
    assert [rank.state for rank in read_status(run).ranks] == ["COMPLETED", "NOT_STARTED"]


def test_the_newest_attempt_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fail(start_attempt(run, 0), will_restart=True)
    complete(run, start_attempt(run, 1))
    status = read_status(run)
    assert (status.attempt, status.state.value, status.root_cause) == (1, "COMPLETED", None)


def test_a_run_without_metrics_has_no_progress(tmp_path: Path) -> None:
    assert read_status(make_run(tmp_path)).progress is None


def test_progress_is_that_of_the_newest_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, steps=60)
    progress = read_progress(run)
    assert progress is not None
    assert progress.to_json() == {
        "epoch": 3,
        "epochs": 4,
        "step": 60,
        "steps": 100,
        "fraction": 0.6,
        "loss": pytest.approx(2 / 60),
        "accuracy": 0.55,
        "images_per_s": 12800.0,
        "eta_s": pytest.approx(4.0),
        "values": {},
        "losses": tuple(2.0 / step for step in range(29, 61)),
    }


def test_nothing_is_left_to_wait_for_after_the_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, steps=100)
    progress = read_progress(run)
    assert progress is not None
    assert (progress.fraction, progress.eta_s) == (1.0, 0.0)


def test_the_pace_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, steps=10)
    append_jsonl(run.metrics, {"kind": "train", "attempt": 1, "step": 6, "steps_total": 100, "time": 2e9, "loss": 1.0})
    progress = read_progress(run)
    assert progress is not None
    assert (progress.step, progress.eta_s) == (6, None)


def test_progress_reads_only_the_end_of_long_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with open(run.metrics, "wb") as file:
        file.truncate(5_000_000_000)  # a hole: the test must not read five gigabytes
        file.seek(0, 2)
        file.write(b'\n{"kind": "train", "step": 3, "steps_total": 4, "epoch": 1, "loss": 0.5}\n')
    progress = read_progress(run)
    assert progress is not None
    assert progress.fraction == 0.75


@pytest.mark.parametrize(
    "tail", [b'{"kind": "train", "st', b"[1, 2]\n", b"\xff\xfe\n", b'{"step": "seven"}\n', b"NaN\n"]
)
def test_a_row_that_is_none_is_passed_over(tmp_path: Path, tail: bytes) -> None:
    run = make_run(tmp_path)
    train(run, steps=3)
    with open(run.metrics, "ab") as file:
        file.write(tail)
    progress = read_progress(run)
    assert progress is not None
    assert progress.step == 3


def test_a_loss_that_is_not_finite_is_no_json_number_and_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    append_jsonl(run.metrics, {"kind": "train", "step": 1, "loss": float("nan")})
    progress = read_progress(run)
    assert progress is not None
    assert progress.loss is None


def test_the_end_of_a_log_is_shown_without_its_escape_sequences(tmp_path: Path) -> None:
    log = tmp_path / "rank-000.err"
    log.write_bytes(b"first\n\n\x1b[31mred\x1b[0m\n" + b"x" * 5000 + b"\n\xff last\n")
    lines = read_log_tail(log, max_lines=3)
    assert lines == ["\\x1b[31mred\\x1b[0m", "x" * 197 + "...", "\\xff last"]


@pytest.mark.parametrize(
    "log",
    ["/proc/self/environ", "../../etc/passwd", "attempts/0/logs/../../../x.err", "attempts/0/logs/rank-0.err\n", ""],
)
def test_a_record_cannot_choose_which_file_is_shown(tmp_path: Path, log: str) -> None:
    run = make_run(tmp_path)
    attempt = fail(start_attempt(run)) or run.attempt(0)
    end = json.loads(attempt.end.read_text())
    end["root_cause"]["log"] = log
    attempt.end.write_text(json.dumps(end))
    cause = read_status(run).root_cause
    assert cause is not None
    assert cause.log is None


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_log_is_not_shown_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    log = tmp_path / "rank-000.err"
    log.symlink_to(tmp_path / "secret") if kind == "link" else os.mkfifo(log)
    assert read_log_tail(log) == []


@pytest.mark.parametrize(
    "text",
    [
        b"null",
        b"[1, 2]",
        b"7",
        b'"x"',
        b"[" * 100_000,
        b'{"outcome": "DONE"}',
        b'{"outcome": "FAILED", "reason": 3}',
        b"\xff",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_an_end_that_is_none_is_an_error_of_that_run_alone(tmp_path: Path, text: bytes) -> None:
    run = make_run(tmp_path)
    start_attempt(run).end.write_bytes(text)
    status = read_status(run)
    assert (status.state.value, "end.json: " in status.reason) == ("UNKNOWN", True)


@pytest.mark.parametrize("change", [{"token": 7}, {"created_ns": "x"}, {"job_id": []}, {"submitter": "me"}])
def test_a_record_whose_values_are_of_another_type_is_an_error(tmp_path: Path, change: dict[str, object]) -> None:
    run = make_run(tmp_path)
    run.record.write_text(json.dumps(json.loads(run.record.read_text()) | change))
    with pytest.raises(ClusterddpError, match=f"not a RunRecord: {next(iter(change))} is"):
        read_status(run)


def test_a_pipe_in_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.record.unlink()
    os.mkfifo(run.record)
    with pytest.raises(ClusterddpError, match="is not a regular file"):
        read_status(run)
