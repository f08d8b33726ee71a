"""A checkpoint is there whole or not at all, and damage never gets past its sum."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.train.checkpoint import Store, commit, decode, read_newest
from clusterddp.train.loop import train
from tests.support.storage_faults import away
from tests.support.train_gang import make_run, one_rank, settle, train_once


def store(path: Path, *, attempt: int = 0, keep: int = 2) -> Store:
    return Store(run=RunDir(path), attempt=attempt, keep=keep)


def put(path: Path, step: int, data: bytes = b"weights", *, attempt: int = 0, keep: int = 2) -> None:
    commit(store(path, attempt=attempt, keep=keep), data, epoch=0, step=step, samples=step)


def newest(path: Path) -> tuple[int, int, bytes] | None:
    found = read_newest(store(path), lambda text: None)
    return None if found is None else (found[0].attempt, found[0].step, found[1])


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "checkpoints").iterdir())


# -- what is written


def test_no_checkpoint_means_none(tmp_path: Path) -> None:
    assert newest(tmp_path) is None


def test_the_newest_comes_back_with_its_manifest(tmp_path: Path) -> None:
    put(tmp_path, 5, b"five")
    put(tmp_path, 12, b"twelve")
    assert newest(tmp_path) == (0, 12, b"twelve")
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000012-a0.json").read_text())
    assert set(manifest) == {"file", "sha256", "bytes", "attempt", "epoch", "step", "samples", "created"}
    assert manifest["file"] == "step-00000012-a0.pt"


def test_only_the_generations_to_keep_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        put(tmp_path, step, keep=2)
    assert names(tmp_path) == [f"step-0000000{step}-a0.{end}" for step in (3, 4) for end in ("json", "pt")]


def test_leftovers_of_killed_writers_are_cleared_and_strange_files_are_not(tmp_path: Path) -> None:
    put(tmp_path, 1)
    for name in ("step-00000002-a0.pt", ".step-00000003-a0.pt.abc", ".step-00000003-a0.json.x", "notes.txt"):
        (tmp_path / "checkpoints" / name).touch()
    put(tmp_path, 4, attempt=1)
    assert names(tmp_path) == [
        "notes.txt",
        *("step-00000001-a0.json", "step-00000001-a0.pt", "step-00000004-a1.json", "step-00000004-a1.pt"),
    ]


def test_a_checkpoint_is_private(tmp_path: Path) -> None:
    put(tmp_path, 1)
    assert (tmp_path / "checkpoints").stat().st_mode & 0o077 == 0
    assert all(entry.stat().st_mode & 0o077 == 0 for entry in (tmp_path / "checkpoints").iterdir())


def test_it_is_loadable_weights_only_and_has_the_inner_modules_names(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    state = torch.load(path / "checkpoints" / "step-00000018-a0.pt", weights_only=True)
    assert set(state) >= {
        *("model", "optimizer", "epoch", "step", "samples_in_epoch", "samples", "own", "spec", "world_size"),
        *("best_accuracy", "train_seconds", "precision", "comm", "exchange"),
    }
    assert not [name for name in state["model"] if name.startswith(("module.", "_orig_mod."))]
    assert (state["epoch"], state["step"], state["samples_in_epoch"], state["samples"]) == (1, 18, 0, 288)
    manifest = json.loads((path / "checkpoints" / "step-00000018-a0.json").read_text())
    assert (manifest["epoch"], manifest["step"], manifest["samples"]) == (1, 18, 288)
    assert len(state["own"]) == state["world_size"] == 1
    setting = settle(one_rank(), path, epochs=1)
    model = train(setting).model
    assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())


def test_the_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, epochs=1)
    expected = torch.rand(3).tolist(), random.random()
    train(settle(one_rank(), path, epochs=1, attempt=1))
    assert (torch.rand(3).tolist(), random.random()) == expected


# -- damage


def test_a_damaged_newest_is_reported_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    put(tmp_path, 1, b"good")
    put(tmp_path, 2, b"better")
    (tmp_path / "checkpoints" / "step-00000002-a0.pt").write_bytes(b"bettes")
    reports: list[str] = []
    found = read_newest(store(tmp_path), reports.append)
    assert found is not None
    assert found[1] == b"good"
    assert reports == [
        "the checkpoint step-00000002-a0.json is not valid and is passed over: "
        "step-00000002-a0.pt is damaged: its sha256 is not the manifest's"
    ]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "\x00", '{"file": "../../secret.pt"}', "null"],
)
def test_a_manifest_that_makes_no_sense_is_passed_over(tmp_path: Path, text: str) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    (tmp_path / "checkpoints" / "step-00000002-a0.json").write_text(text)
    assert newest(tmp_path) == (0, 1, b"weights")


def test_a_manifest_cannot_point_elsewhere(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "elsewhere.pt").write_bytes(b"weights")
    manifest = tmp_path / "checkpoints" / "step-00000001-a0.json"
    manifest.write_text(manifest.read_text().replace("step-00000001-a0.pt", "../elsewhere.pt"))
    assert newest(tmp_path) is None


def test_missing_data_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    (tmp_path / "checkpoints" / "step-00000002-a0.pt").unlink()
    assert newest(tmp_path) == (0, 1, b"weights")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 128]) + data[len(data) // 2 + 1 :],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
    ],
    ids=["first byte", "middle byte", "last byte", "cut short", "too long", "empty"],
)
def test_a_real_checkpoint_that_is_damaged_is_never_unpickled(
    tmp_path: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    whole = train_once(one_rank(), path, epochs=1, max_steps=2)
    (file,) = (path / "checkpoints").glob("*.pt")
    file.write_bytes(damage(file.read_bytes()))
    assert newest(path) is None
    assert train_once(one_rank(), path, epochs=1, max_steps=2, attempt=1) == whole  # from the first step on
    assert "resumed from" not in capsys.readouterr().err


def test_nothing_but_tensors_and_plain_values_is_unpickled(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / "evil.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        decode((tmp_path / "evil.pt").read_bytes())


def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run")
    whole = train_once(one_rank(), path)
    file = path / "checkpoints" / "step-00000036-a0.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert train_once(one_rank(), path, attempt=1) == whole
    talk = capsys.readouterr().err
    assert "step-00000036-a0.json is not valid" in talk
    assert "resumed from step-00000018-a0.pt: step 18 of 36" in talk


# -- attempts


def test_an_attempt_that_was_overtaken_may_not_commit(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    with pytest.raises(ClusterddpError, match="attempt 1 of the run has begun, this is attempt 0"):
        put(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001-a0.json", "step-00000001-a0.pt"]


def test_a_later_attempts_checkpoint_is_newer_whatever_its_step(tmp_path: Path) -> None:
    put(tmp_path, 900, b"written by a node that was cut off")
    put(tmp_path, 100, b"resumed", attempt=1)
    assert newest(tmp_path) == (1, 100, b"resumed")


def test_attempts_count_as_numbers(tmp_path: Path) -> None:
    for attempt in (2, 9, 10):
        put(tmp_path, 1, b"%d" % attempt, attempt=attempt, keep=9)
    assert newest(tmp_path) == (10, 1, b"10")


# -- writers that are killed, disks that are full

WRITERS = """
import os, signal, sys, time
from pathlib import Path
from clusterddp.run.directory import RunDir
from clusterddp.train.checkpoint import Store, commit
store = Store(run=RunDir(Path(sys.argv[1])), attempt=0, keep=2)
for line in sys.stdin:
    first, delay = line.split()
    writer = os.fork()
    if writer == 0:
        for step in range(int(first), 10**6):
            commit(store, bytes([step % 251]) * 300_000, epoch=0, step=step, samples=step)
            os.write(1, b"%d\\n" % step)
    time.sleep(float(delay))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    print("killed", flush=True)
"""


def test_kill_9_while_writing_never_leaves_an_invalid_newest(tmp_path: Path) -> None:
    delays = random.Random(0)
    committed = -1
    command = [sys.executable, "-c", WRITERS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for number in range(400):
            if number >= 40 and committed > 40:  # on a slow disk few kills come after a commit
                break
            writers.stdin.write(f"{committed + 1} {delays.random() * 0.05}\n")
            writers.stdin.flush()
            while (line := writers.stdout.readline()) != "killed\n":
                committed = int(line)
            reports: list[str] = []
            found = read_newest(store(tmp_path), reports.append)
            assert reports == []
            if found is not None:
                assert found[0].step in (committed, committed + 1)
                assert found[1] == bytes([found[0].step % 251]) * 300_000
                committed = found[0].step
        writers.stdin.close()
    assert committed > 40


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from clusterddp.run.directory import RunDir
from clusterddp.train.checkpoint import Store, commit

countdown = -1

def before_call(event, arguments=()):
    # Every open, rename, removal and listing raises an audit event before it is done.
    global countdown
    if countdown >= 0 and event in ("open", "fsync", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir"):
        countdown -= 1
        if countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def fsync(descriptor, real=os.fsync):
    before_call("fsync")
    real(descriptor)

sys.addaudithook(before_call)
os.fsync = fsync
calls = 0
while True:
    calls += 1
    store = Store(run=RunDir(Path(sys.argv[1]) / str(calls)), attempt=0, keep=1)
    store.run.path.mkdir()
    commit(store, b"one", epoch=0, step=1, samples=1)
    writer = os.fork()
    if writer == 0:
        countdown = calls
        commit(store, b"two", epoch=0, step=2, samples=2)
        os._exit(0)
    if os.waitpid(writer, 0)[1] == 0:
        break
print(calls)
"""


def test_a_writer_killed_before_any_of_its_system_calls_leaves_a_valid_newest(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AT, str(tmp_path)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    calls = int(result.stdout)
    assert calls > 8
    found = [newest(tmp_path / str(killed_at)) for killed_at in range(1, calls + 1)]
    assert set(found) == {(0, 1, b"one"), (0, 2, b"two")}
    assert found == sorted(found)


FILLED = """
import resource, signal, sys
from pathlib import Path
from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.train.checkpoint import Store, commit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
store = Store(run=RunDir(Path(sys.argv[1])), attempt=0, keep=2)
try:
    commit(store, b"x" * 1_000_000, epoch=0, step=2, samples=2)
except ClusterddpError as error:
    print(error.message)
    print(error.hint)
"""


def test_an_attempt_that_stalled_leaves_what_its_successor_is_writing(tmp_path: Path) -> None:
    put(tmp_path, 1, keep=1)
    unfinished = [tmp_path / "checkpoints" / name for name in ("step-00000009-a1.pt", ".step-00000009-a1.pt.tmp")]
    for path in unfinished:
        path.write_bytes(b"half")  # its manifest follows; the older attempt has looked before attempt 1 was there
    put(tmp_path, 2, keep=1)
    assert all(path.exists() for path in unfinished)
    assert newest(tmp_path) == (0, 2, b"weights")


def test_a_checkpoint_waits_for_storage_that_is_away(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "brisk-otter-3"
    run.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with away(run.parent):
            written = pool.submit(put, run, 1)
            time.sleep(0.5)
            assert not written.done()
        written.result()
    assert newest(run) == (0, 1, b"weights")


def test_a_write_that_the_system_refuses_leaves_the_old_one_and_no_rest(tmp_path: Path) -> None:
    put(tmp_path, 1)
    command = [sys.executable, "-c", FILLED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    message, hint = result.stdout.splitlines()
    assert message.startswith("the checkpoint was not written: ")
    assert message.endswith("step-00000002-a0.pt: cannot be written: File too large")
    assert hint.startswith("earlier checkpoints are untouched: make room")
    assert names(tmp_path) == ["step-00000001-a0.json", "step-00000001-a0.pt"]
    assert newest(tmp_path) == (0, 1, b"weights")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], check=True, timeout=10)
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=10)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_old_one_and_no_rest(small_disk: Path) -> None:
    put(small_disk, 1, b"x" * 600_000)
    with pytest.raises(ClusterddpError, match="No space left on device"):
        put(small_disk, 2, b"x" * 600_000)
    assert names(small_disk) == ["step-00000001-a0.json", "step-00000001-a0.pt"]
    assert newest(small_disk) == (0, 1, b"x" * 600_000)
    assert os.statvfs(small_disk).f_bavail > 50


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(ClusterddpError, match="the checkpoint was not written"):
        put(tmp_path, 1)


def test_a_step_that_is_committed_is_not_written_again(tmp_path: Path) -> None:
    put(tmp_path, 1, b"first")
    first = tmp_path / "checkpoints" / "step-00000001-a0.pt"
    before = first.stat()
    put(tmp_path, 1, b"second")
    after = first.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert newest(tmp_path) == (0, 1, b"first")


def test_a_damaged_commit_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, 1, b"first")
    (tmp_path / "checkpoints" / "step-00000001-a0.pt").write_bytes(b"tsrif")
    put(tmp_path, 1, b"again")
    assert newest(tmp_path) == (0, 1, b"again")
