"""Files of a run on storage that is full, read-only, has no hard links, or is away for a while."""

import errno
import itertools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from clusterddp.run.attempts import AttemptEnd, deliver_end, read_end, read_spooled, spool_end
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.system.exclusive import name_new, probe_exclusive
from clusterddp.system.files import append_jsonl, read_json, read_jsonl, write_json
from clusterddp.system.storage import retry_outage
from tests.support.storage_faults import away, disk

END = AttemptEnd(outcome="FAILED", reason="rank 3 raised")


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "runs" / "brisk-otter-3")
    run.path.mkdir(parents=True)
    make_attempt_dirs(run.attempt(0))
    return run


@pytest.mark.root
def test_a_row_that_a_full_disk_takes_in_part_is_reported_and_spoils_no_later_row(tmp_path):
    with disk(tmp_path / "disk", size="2M") as full:
        path = full.path / "metrics.jsonl"
        append_jsonl(path, {"step": 1})
        filler = full.fill()
        os.truncate(filler, filler.stat().st_size - 4096)
        written = []
        with pytest.raises(OSError, match="No space left"):
            append_until_refused(path, written)
        filler.unlink()
        append_jsonl(path, {"step": "last"})
        assert [row["step"] for row in read_jsonl(path)] == [1, *written, "last"]


def append_until_refused(path, written):
    for step in itertools.count(2):
        append_jsonl(path, {"step": step, "text": "y" * 700})
        written.append(step)


@pytest.mark.root
def test_where_no_hard_links_are_the_first_of_many_writers_wins(tmp_path):
    with disk(tmp_path / "disk", "exfat") as plain:
        assert probe_exclusive(plain.path) == "lock"
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n: write_json(plain.path / "end.json", {"n": n}, exclusive=True), range(8)))
        assert won.count(True) == 1
        assert read_json(plain.path / "end.json") == {"n": won.index(True)}


def test_a_rename_that_replaces_nothing_has_one_winner(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # a file system that has the rename and no links cannot be mounted here
    assert probe_exclusive(tmp_path) == "rename"
    assert write_json(tmp_path / "end.json", 1, exclusive=True)
    assert not write_json(tmp_path / "end.json", 2, exclusive=True)
    assert (read_json(tmp_path / "end.json"), os.listdir(tmp_path)) == (1, ["end.json"])


def test_a_link_whose_answer_was_lost_is_the_writer_s_own(tmp_path):
    mine = tmp_path / "mine"
    mine.touch()
    os.link(mine, tmp_path / "end.json")  # what an NFS server has done when its answer is lost and it is asked again
    assert name_new(str(mine), tmp_path / "end.json")
    other = tmp_path / "other"
    other.touch()
    assert not name_new(str(other), tmp_path / "end.json")


def test_the_directory_of_a_run_that_is_away_is_not_made_anew(run):
    with away(run.path.parent):
        with pytest.raises(FileNotFoundError):
            make_attempt_dirs(run.attempt(0))
        with pytest.raises(FileNotFoundError):
            run.attempts()
        assert not run.path.parent.exists()
    assert [attempt.number for attempt in run.attempts()] == [0]


def test_an_outage_is_waited_for(run):
    def come_back() -> None:
        time.sleep(0.6)
        gone.rename(run.path)

    gone = run.path.with_name("gone")
    run.path.rename(gone)
    thread = threading.Thread(target=come_back)
    thread.start()
    assert retry_outage(run.newest_attempt).number == 0
    thread.join()


def test_what_a_file_system_refuses_is_not_tried_again():
    tries = []

    def refuse() -> None:
        tries.append(1)
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        retry_outage(refuse)
    assert len(tries) == 1


def test_an_end_that_was_spooled_is_delivered_and_gone_from_the_spool(run):
    assert spool_end("t" * 32, 0, END)
    assert not spool_end("t" * 32, 0, AttemptEnd(outcome="COMPLETED", reason="late"))
    end = read_spooled("t" * 32, 0)
    assert end == END
    deliver_end(run.attempt(0), "t" * 32, end)
    assert (read_end(run.attempt(0)).reason, read_spooled("t" * 32, 0)) == (END.reason, None)


def test_a_record_of_another_user_names_no_file_outside_the_spool(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    spool_end("../../../runs/brisk-otter-3/x", 0, END)
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["ends"]


def test_a_final_end_takes_the_secrets_along(run):
    run.launcher_dir.mkdir()
    run.job_secrets.write_text(json.dumps({"TOKEN": "canary"}))
    deliver = AttemptEnd(outcome="STOPPED", reason="", will_restart=True)
    spool_end("u" * 32, 0, deliver)
    deliver_end(run.attempt(0), "u" * 32, deliver)
    assert run.job_secrets.exists()
    make_attempt_dirs(run.attempt(1))
    spool_end("u" * 32, 1, END)
    deliver_end(run.attempt(1), "u" * 32, END)
    assert not run.job_secrets.exists()
