"""Fetching what is large: checkpoints whole or not at all, disks that are full, nothing twice."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.places.ssh.download import PIECE_BYTES
from clusterddp.places.state import read_state
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from tests.support.agent_hosts import Hosts, running_hosts
from tests.support.storage_faults import disk
from tests.support.waiting import wait_until

END = AttemptEnd(outcome="COMPLETED", reason="all ranks ended with exit code 0")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running_hosts(tmp_path, "gpu01", "gpu02", fetch=("logs", "metrics", "checkpoints")) as hosts:
        yield hosts


def save(run: RunDir, step: int, *, attempt: int = 0, num_bytes: int = 1000) -> str:
    """Commit a checkpoint as the trainer does; return its name."""
    name, data = f"step-{step:08d}-a{attempt}", os.urandom(num_bytes)
    (run.checkpoints / f"{name}.pt").write_bytes(data)
    manifest = {"file": f"{name}.pt", "sha256": hashlib.sha256(data).hexdigest(), "bytes": num_bytes}
    (run.checkpoints / f"{name}.json").write_text(json.dumps(manifest))
    return name


def fetched(hosts: Hosts) -> list[str]:
    return sorted(path.name for path in hosts.run.checkpoints.iterdir())


def test_what_the_spec_says_is_downloaded_when_the_run_has_ended(hosts: Hosts) -> None:
    attempts = hosts.start()
    for rank in range(4):
        attempts[rank // 2].stderr(rank).write_bytes(b"of rank %d" % rank)
    name = save(hosts.head, 7)
    write_end(attempts[0], END)
    assert hosts.fetch()
    assert [hosts.run.attempt(0).stderr(rank).read_bytes() for rank in range(4)] == [
        b"of rank %d" % n for n in range(4)
    ]
    assert fetched(hosts) == [f"{name}.json", f"{name}.pt"]


def test_what_the_spec_does_not_name_is_left_where_it_is(tmp_path: Path) -> None:
    with running_hosts(tmp_path, "gpu01", fetch=()) as hosts:
        attempt = hosts.start()[0]
        attempt.stdout(0).write_bytes(b"words")
        save(hosts.head, 7)
        write_end(attempt, END)
        assert hosts.fetch()
        assert (fetched(hosts), list(hosts.run.attempt(0).logs.iterdir())) == ([], [])


def test_what_was_fetched_is_not_asked_for_again(hosts: Hosts) -> None:
    write_end(hosts.start()[0], END)
    hosts.fetch()
    hosts.down.update(hosts.names)
    assert hosts.fetch()


def test_a_host_that_is_down_leaves_something_to_fetch(hosts: Hosts) -> None:
    write_end(hosts.start()[0], END)
    hosts.down.add("gpu02")
    assert not hosts.fetch()
    hosts.down.clear()
    assert hosts.fetch()


def test_a_run_that_goes_on_after_its_end_is_fetched_again(hosts: Hosts) -> None:
    write_end(hosts.start()[0], END)
    hosts.fetch()
    write_end(hosts.start(1)[0], END)
    hosts.run.attempt(1).path.mkdir()
    name = save(hosts.head, 9, attempt=1)
    hosts.fetch()
    assert f"{name}.pt" in fetched(hosts)


def test_a_checkpoint_without_a_manifest_is_fetched_as_it_is(hosts: Hosts) -> None:
    (hosts.head.checkpoints / "mine.pt").write_bytes(b"weights")
    write_end(hosts.start()[0], END)
    hosts.fetch()
    assert (hosts.run.checkpoints / "mine.pt").read_bytes() == b"weights"


def test_a_checkpoint_whose_copy_was_cut_off_goes_on_where_it_was(hosts: Hosts) -> None:
    name = save(hosts.head, 7, num_bytes=5 * PIECE_BYTES)
    write_end(hosts.start()[0], END)
    data = hosts.head.checkpoints / f"{name}.pt"
    partial = hosts.run.checkpoints / f".{name}.pt.{data.stat().st_mtime_ns}.part"
    partial.write_bytes(data.read_bytes()[: 3 * PIECE_BYTES])
    hosts.fetch()
    reads = [session.asked.count("run.read") for session in hosts.sessions if session.host == "gpu01"]
    assert (hosts.run.checkpoints / data.name).read_bytes() == data.read_bytes()
    assert reads == [5]  # records, the end, the manifest, two pieces


def test_the_manifest_comes_after_the_shards_of_a_sharded_checkpoint(hosts: Hosts) -> None:
    write_end(hosts.start()[0], END)
    name = save(hosts.head, 7)
    files = {f"{name}.json", f"{name}.pt", f"{name}.shard-00000", f"{name}.shard-00001"}
    for rank in range(2):
        (hosts.head.checkpoints / f"{name}.shard-{rank:05d}").write_bytes(b"x" * 3 * PIECE_BYTES)
    lacking: list[set[str]] = []

    def look(do: str) -> None:
        here = set(fetched(hosts))
        if f"{name}.json" in here:
            lacking.append(files - here)

    hosts.before_ask = look
    assert hosts.fetch()
    assert set(fetched(hosts)) == files
    assert not any(lacking)


def test_a_checkpoint_that_goes_while_it_is_copied_leaves_nothing_half(hosts: Hosts) -> None:
    """The trainer drops a generation when a newer one is there."""
    hosts.start()
    old = save(hosts.head, 7, num_bytes=3 * PIECE_BYTES)

    def replace_it(do: str) -> None:
        if list(hosts.run.checkpoints.glob(".*.part")) and (hosts.head.checkpoints / f"{old}.pt").exists():
            save(hosts.head, 8)
            for suffix in (".json", ".pt"):
                (hosts.head.checkpoints / f"{old}{suffix}").unlink()

    hosts.before_ask = replace_it
    assert hosts.fetch()
    assert fetched(hosts) == ["step-00000008-a0.json", "step-00000008-a0.pt"]


def test_a_fetch_waits_for_those_who_may_still_write(hosts: Hosts) -> None:
    attempt = hosts.start()[0]
    guard = hosts.process("g0")
    write_end(attempt, END)
    sync = hosts.sync()
    leaving = subprocess.Popen(["sleep", "0.7"])
    attempt.stdout(0).write_bytes(b"first ")

    def leave() -> None:
        leaving.wait()
        with open(attempt.stdout(0), "ab") as log:
            log.write(b"last words")
        hosts.kill(guard)

    thread = threading.Thread(target=leave)
    thread.start()
    sync.download()
    sync.close()
    thread.join()
    assert hosts.run.attempt(0).stdout(0).read_bytes() == b"first last words"


@pytest.mark.root
def test_a_full_disk_is_said_once_and_costs_nothing_that_is_there(hosts: Hosts) -> None:
    attempt = hosts.start()[0]
    attempt.stdout(0).write_bytes(os.urandom(16 << 20))
    with small_disk(hosts.run.path, "26m"):
        sync = hosts.sync()
        sync.want_logs([0], 0)
        for _ in range(2):
            sync.update_logs()
        sync.close()
        ours = hosts.run.attempt(0).stdout(0).read_bytes()
        assert ours
        assert attempt.stdout(0).read_bytes().startswith(ours)
        assert shutil.disk_usage(hosts.run.path).free > 8 << 20
    assert [text for text in hosts.said if "No space left on device" in text] == hosts.said[:1] == hosts.said


def test_reports_of_hosts_that_cannot_be_written_are_a_problem_with_its_hint(hosts: Hosts) -> None:
    hosts.start()
    (hosts.run.launcher_dir / ".hosts.lock").symlink_to(hosts.directory / "elsewhere")
    hosts.look()
    assert hosts.said[-1].startswith(str(hosts.run.launcher_dir / ".hosts.lock"))
    assert hosts.said[-1].endswith(
        " (hint: the run goes on and its hosts keep the files; the next command downloads them)"
    )


@pytest.mark.root
@pytest.mark.parametrize(("left", "kept_mb"), [(40 << 20, 51), (10 << 20, 17)])
def test_what_a_host_sends_leaves_a_part_of_the_disk(hosts: Hosts, left: int, kept_mb: int) -> None:
    if kept_mb > 17:  # a log; of records a smaller part is left
        hosts.start()[0].stdout(0).write_bytes(b"x")
    else:
        hosts.start()
    kept = hosts.run.path.with_name("kept")
    shutil.copytree(hosts.run.path, kept)
    with disk(hosts.run.path, size="1G"):
        shutil.copytree(kept, hosts.run.path, dirs_exist_ok=True)
        with (hosts.run.path / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(hosts.run.path).free - left)
        hosts.logs(0)
        assert not hosts.run.attempt(0).stdout(0).exists()
        assert not list(hosts.run.attempt(0).ranks.glob("000*"))
        (text,) = {text for text in hosts.said if "No space left on device, of which" in text}
        assert f"of which {kept_mb} MB stay free" in text


@pytest.mark.root
def test_a_checkpoint_that_has_no_room_is_not_begun(hosts: Hosts) -> None:
    save(hosts.head, 7, num_bytes=8 << 20)
    write_end(hosts.start()[0], END)
    with small_disk(hosts.run.path, "4m"):
        assert not hosts.fetch()
        assert fetched(hosts) == []
        assert read_state(hosts.run).state.value == "COMPLETED"
    assert "8.4 MB to download from gpu01" in hosts.said[-1]


class small_disk:  # noqa: N801
    """Put a run's directory on a disk of its own."""

    def __init__(self, path: Path, size: str) -> None:
        self.path, self.size = path, size

    def __enter__(self) -> None:
        kept = self.path.with_name("kept")
        shutil.copytree(self.path, kept)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.size}", "none", str(self.path)], check=True)
        shutil.copytree(kept, self.path, dirs_exist_ok=True)

    def __exit__(self, *exception: object) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


def test_when_the_network_is_back_the_hosts_that_follow_are_waited_for(hosts: Hosts) -> None:
    hosts.start()
    sync = hosts.sync()
    hosts.down.update(hosts.names)
    sync.update()
    write_end(hosts.head.attempt(0), END)
    hosts.down.discard(hosts.names[0])
    wait_until(lambda: sync.update() or any("answers again" in words for words in hosts.said), 20)
    threading.Timer(1.0, hosts.down.clear).start()
    assert sync.download()
    sync.close()


def test_a_host_that_waits_for_its_next_try_is_asked_at_once_when_another_answers_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.start()
    sync = hosts.sync()
    hosts.down.add("gpu02")
    with monkeypatch.context() as patch:  # as after many failures: the next try is 15 to 30 s away
        patch.setattr("clusterddp.places.ssh.sessions._FIRST_PAUSE_S", 30.0)
        sync.update(timeout_s=60)
    hosts.down.add("gpu01")
    hosts.break_links()
    wait_until(lambda: sync.update() or any(words.startswith("gpu01 cannot be reached") for words in hosts.said), 20)
    hosts.down.clear()
    wait_until(lambda: sync.update(timeout_s=60) or "gpu01 answers again" in hosts.said, 20)
    sync.update(timeout_s=60)
    sync.close()
    assert "gpu02 answers again" in hosts.said
