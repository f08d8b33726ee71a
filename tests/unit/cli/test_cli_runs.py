"""Commands about runs that exist, on runs made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.record import RankEnd
from clusterddp.system.files import write_json
from tests.support.handmade_runs import HOST, complete, fail, make_run, opens_of, start_attempt, train


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command; end it with the test, whatever that finds."""
    argv = [sys.executable, "-m", "clusterddp", *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def test_status_without_a_name_shows_the_newest_run(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(runs_dir, "old-cat-1")
    make_run(runs_dir, "new-dog-2")
    code, out, _ = command(capfd, "status", "-o", "json")
    assert (code, json.loads(out)["run"]) == (0, "new-dog-2")


def test_status_shows_a_user_why_a_run_failed_and_what_to_type(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(runs_dir, nodes=2, per_node=8)
    fail(start_attempt(run, ranks=16, per_node=8), rank=9, ranks=16, per_node=8)
    code, out, _ = command(capfd, "status", "brisk")
    assert code == 0
    assert "FAILED" in out
    assert "7 KILLED, 1 FAILED" in out
    assert "ValueError: the loss is nan  (exit code 1)" in out
    assert "  | Traceback (most recent call last):" in out
    assert "\x1b" not in out
    assert "clusterddp logs brisk-otter-3 --rank 9" in out
    assert "clusterddp submit brisk-otter-3" in out


def test_a_failed_run_with_a_checkpoint_can_go_on(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    fail(start_attempt(run))
    (run.checkpoints / "step-00000010.json").write_text("{}")
    assert "clusterddp resume brisk-otter-3" in command(capfd, "status")[1]


@pytest.mark.parametrize(
    ("error", "label"),
    [
        ("rank 1 on node2 was killed by SIGKILL", "try again "),
        ("node2 is lost: no answer; its ranks 2-3 ended with it", "try again "),
        ("rank 1 on node2: OSError: [Errno 113] No route to host", "try again "),
        ("rank 1 on node2: ValueError: bad value", "once fixed"),
        ("rank 1 on node2: FileNotFoundError: [Errno 2] No such file or directory: 'data/7'", "once fixed"),
        ("rank 1 on node2 exited with code 127; the last line of its stderr: sh: 1: module: not found", "once fixed"),
    ],
)
def test_to_try_again_is_proposed_where_it_can_help(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], error: str, label: str
) -> None:
    attempt = start_attempt(make_run(runs_dir))
    cause = RankEnd(rank=1, host="node2", exit_code=1, error=error)
    write_end(attempt, AttemptEnd(outcome="FAILED", reason="", root_cause=cause))
    assert f"  {label} clusterddp submit brisk-otter-3" in command(capfd, "status")[1]


@pytest.mark.parametrize(("warning", "command_next"), [("", "resume"), ("it may have completed", "submit")])
def test_a_run_whose_program_saved_by_itself_at_a_stop_can_go_on(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], warning: str, command_next: str
) -> None:
    attempt = start_attempt(make_run(runs_dir))
    write_end(attempt, AttemptEnd(outcome="STOPPED", reason="cancel --save", warning=warning))
    assert f"clusterddp {command_next} brisk-otter-3" in command(capfd, "status")[1]


def test_all_ranks_are_shown_one_by_one_when_asked(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(runs_dir, nodes=2, per_node=8)
    assert "NODE  HOST" in command(capfd, "status")[1]
    assert "  15    1     7 " in command(capfd, "status", "-a")[1]


def test_a_run_elsewhere_is_named_by_its_directory_in_what_to_type(
    runs_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "other place")
    out = command(capfd, "status", "--runs", str(run.path.parent))[1]
    assert f"clusterddp cancel '{run.path}'" in out
    assert command(capfd, "status", str(run.path))[0] == 0


def test_colour_only_underlines_words(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    make_run(runs_dir)
    assert "\x1b[" in command(capfd, "status")[1]
    assert "\x1b" not in command(capfd, "--no-color", "status")[1]
    assert "\x1b" not in command(capfd, "status", "--no-color")[1]


def test_an_unknown_run_is_exit_code_four(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("status", "logs", "wait", "resume", "cancel"):
        code, out, err = command(capfd, name, "nobody")
        assert (name, code, out) == (name, 4, "")
        assert err.startswith("error: no run named nobody in")


def test_an_ambiguous_beginning_is_refused(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(runs_dir, "brisk-otter-3")
    make_run(runs_dir, "brisk-otter-4")
    assert command(capfd, "status", "brisk")[0] == 2


def test_watch_as_json_prints_a_line_per_change_and_ends_with_the_run(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    with started("status", "-w", "-o", "json") as watching:
        assert json.loads(watching.stdout.readline())["state"] == "PENDING"
        complete(run, start_attempt(run))
        states = [json.loads(line)["state"] for line in watching.stdout]
    assert (watching.wait(), states[-1]) == (0, "COMPLETED")


def test_logs_of_one_rank_are_its_bytes(runs_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    attempt = start_attempt(make_run(runs_dir))
    attempt.stdout(0).write_bytes(b"\x1b[1mone\x1b[0m\xff\r\ntwo")
    attempt.stderr(0).write_bytes(b"\nthree\n")
    assert main(["logs"]) == 0
    assert capfdbinary.readouterr().out == b"\x1b[1mone\x1b[0m\xff\r\ntwo\nthree\n"


def test_logs_of_several_ranks_say_whose_line_it_is(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    attempt = start_attempt(run)
    for rank in (0, 1):
        attempt.stdout(rank).write_text(f"a of {rank}\nb of {rank}\n")
    out = command(capfd, "logs", "--rank", "all", "--tail", "1")[1]
    assert out == f"[r0 {HOST}] b of 0\n[r1 {HOST}] b of 1\n"


def test_logs_of_an_earlier_attempt(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    first = start_attempt(run, 0)
    first.stdout(0).write_text("first\n")
    fail(first, will_restart=True)
    start_attempt(run, 1).stdout(0).write_text("second\n")
    assert command(capfd, "logs")[1] == "second\n"
    assert command(capfd, "logs", "--attempt", "0")[1] == "first\n"
    assert command(capfd, "logs", "--attempt", "2")[0] == 2


def test_logs_point_to_the_rank_that_failed(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attempt = start_attempt(make_run(runs_dir))
    attempt.stdout(0).write_text("fine here\n")
    fail(attempt, rank=1)
    _, _, err = command(capfd, "logs")
    assert err == "rank 1 failed first: clusterddp logs brisk-otter-3 --rank 1\n"
    assert "ValueError" in command(capfd, "logs", "--rank", "failed")[1]


def test_logs_that_are_empty_say_so(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(runs_dir)
    code, out, err = command(capfd, "logs")
    assert (code, out) == (0, "")
    assert err == "rank 0 of brisk-otter-3 has written nothing\n"


def test_following_logs_ends_with_the_run_and_exit_code_zero(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    with started("logs", "-f") as following:
        attempt = start_attempt(run)
        attempt.stdout(0).write_text("one\n")
        assert following.stdout.readline() == "one\n"
        fail(attempt)
        assert (following.stdout.read(), following.wait()) == ("", 0)


@pytest.mark.parametrize(("outcome", "exit_code"), [("COMPLETED", 0), ("FAILED", 5), ("CANCELLED", 6), ("STOPPED", 6)])
def test_wait_exits_with_how_the_run_ended(
    outcome: str, exit_code: int, runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(runs_dir)
    write_end(start_attempt(run), AttemptEnd(outcome=outcome, reason="so it was"))  # type: ignore[arg-type]
    code, out, err = command(capfd, "wait")
    assert (code, out) == (exit_code, "")
    assert err.startswith("brisk-otter-3 ")


def test_wait_gives_up_after_its_time(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start_attempt(make_run(runs_dir))
    code, _, err = command(capfd, "wait", "--timeout", "0.1")
    assert code == 1
    assert "error: brisk-otter-3 is still RUNNING after 0.1 s" in err


def test_the_end_of_a_completed_run_has_its_accuracy(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    complete(run, start_attempt(run))
    write_json(run.summary, {"accuracy": 0.9612})
    assert command(capfd, "wait")[2].endswith("accuracy 96.1%\n")


def test_list_shows_one_line_a_run_newest_first(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = make_run(runs_dir, "old-cat-1")
    train(first, steps=60)
    fail(start_attempt(first))
    make_run(runs_dir, "new-dog-2")
    code, out, _ = command(capfd, "list")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[:2] for line in lines] == [["RUN", "STATE"], ["new-dog-2", "PENDING"], ["old-cat-1", "FAILED"]]
    assert "epoch 3/4 60%" in lines[2]
    assert lines[2].endswith("ValueError: the loss is nan")


def test_list_as_json_and_by_state(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        complete(run := make_run(runs_dir, f"done-{number}"), start_attempt(run))
    make_run(runs_dir, "pending-1")
    listed = json.loads(command(capfd, "list", "--state", "completed", "--limit", "2", "-o", "json")[1])
    assert [run["run"] for run in listed] == ["done-2", "done-1"]


def test_list_without_runs(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(capfd, "list", "-o", "json") == (0, "[]\n", "")
    code, out, err = command(capfd, "list")
    assert (code, out) == (0, "")
    assert "clusterddp demo" in err


def test_a_broken_record_does_not_hide_the_other_runs(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(runs_dir, "fine-1")
    broken = make_run(runs_dir, "broken-1")
    broken.record.write_text("{")
    code, out, err = command(capfd, "list")
    assert code == 0
    assert "fine-1" in out
    assert "broken-1" in out + err


def test_to_list_twice_as_many_runs_opens_twice_as_many_files(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """benchmarks/list_runs.py measures how long a thousand take."""
    num_files = []
    for first in (0, 50):
        for number in range(first, first + 50):
            run = make_run(runs_dir, f"run-{number}")
            train(run, steps=30)
            complete(run, start_attempt(run))
        opened = opens_of(lambda: command(capfd, "list", "--limit", "1000"), runs_dir)
        num_files.append(len(opened))
    assert num_files[0] >= 50
    assert num_files[1] == 2 * num_files[0]


def test_text_of_a_record_cannot_control_the_terminal(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir)
    host = "\x1b]0;pwned\x07\x9b2Jnode\u202e"
    for path in start_attempt(run).ranks.iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"host": host}))
    for arguments in (["status", run.name], ["status", run.name, "-o", "json"], ["list"]):
        _, out, _ = command(capfd, *arguments)
        assert not set(out) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert json.loads(command(capfd, "status", run.name, "-o", "json")[1])["ranks"][0]["host"] == host


def test_what_others_wrote_forges_no_line_and_no_colour_of_a_table(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = make_run(runs_dir)
    attempt = start_attempt(run)
    write_json(attempt.rank_record(0), json.loads(attempt.rank_record(0).read_text()) | {"host": "a\n\x1b[30mforged"})
    write_json(run.record, json.loads(run.record.read_text()) | {"launcher": "local\n\x1b[30mforged"})
    for arguments in (("status",), ("list",)):
        _, out, _ = command(capfd, *arguments)
        assert "\x1b[30m" not in out
        assert not any(line.strip().startswith("forged") for line in out.splitlines())
