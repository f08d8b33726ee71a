"""What hosts keep of what is sent to them: snapshots of code by their sum, data at places of the user's choice."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.agent.storage import staging
from clusterddp.agent.store import OPERATIONS
from clusterddp.agent.types import Body, Host, Reply
from clusterddp.errors import ClusterddpError
from clusterddp.system.file_set import KINDS, list_files, to_json
from clusterddp.system.file_stream import _HEAD, FileStream

STRANGE = os.fsdecode(b"caf\xe9 \n.py")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    root = tmp_path / "root"
    for name in ("code", "runs"):
        (root / name).mkdir(parents=True)
    return Host(root=root, package=root, patience_s=60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with all that a directory may hold."""
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "train.py").write_text("print('hello')\n")
    (source / "sub" / STRANGE).write_bytes(b"\0" * 300_000)
    (source / "sub" / "nothing").touch()
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/nothing")
    return source


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "data"


def ask(host: Host, do: str, body: bytes = b"", **facts: Any) -> dict[str, Any]:
    answer = OPERATIONS[do](host, facts, Body(io.BytesIO(body), len(body)))
    return answer.facts | json.loads(b"".join(answer.chunks)) if isinstance(answer, Reply) else answer


def stream(root: Path) -> bytes:
    sending = FileStream(files=list_files(root))
    data = b"".join(sending.chunks())
    assert len(data) == sending.size
    return data


def handmade(*entries: tuple[str, bytes, bytes]) -> bytes:
    """Make a stream of (kind, name, link or nothing); files are empty."""
    heads = []
    for kind, name, link in entries:
        heads.append(_HEAD.pack(KINDS.index(kind), len(name), len(link), 0) + name + link)  # type: ignore[arg-type]
        if kind in ("file", "exec"):
            heads.append(bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"))
    return b"".join(heads) + _HEAD.pack(len(KINDS), 0, 0, 0)


def put_code(host: Host, root: Path) -> Path:
    digest = list_files(root).digest()
    ask(host, "store.put", stream(root), kind="code", sum=digest)
    return host.root / "code" / digest


def put_data(host: Host, root: Path, target: Path) -> None:
    ask(host, "store.put", stream(root), kind="data", target=str(target))


def compare(host: Host, root: Path, target: Path, *, sums: bool = False) -> dict[str, list[str]]:
    """Return the names for each verdict."""
    files = list_files(root)
    if sums:
        files = files.with_sums(number for number, entry in enumerate(files.entries) if entry.is_file)
    entries = files.entries
    answer = ask(host, "store.compare", json.dumps(to_json(entries)).encode(), target=str(target))
    verdicts = ("absent", "unsure", "changed", "other")
    found = {verdict: [os.fsdecode(entries[number].name) for number in answer[verdict]] for verdict in verdicts}
    return {verdict: names for verdict, names in found.items() if names}


def what_lies_in(place: Path) -> dict[str, bytes | str]:
    """Return all names below a directory, with contents, links, and `/` for directories."""
    found: dict[str, bytes | str] = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        found[name] = str(path.readlink()) if path.is_symlink() else "/" if path.is_dir() else path.read_bytes()
    return found


# Code.


def test_a_snapshot_arrives_as_it_is(host: Host, source: Path) -> None:
    assert what_lies_in(put_code(host, source)) == what_lies_in(source)


def test_a_snapshot_keeps_its_executable_bits(host: Host, source: Path) -> None:
    code = put_code(host, source)
    assert [(code / name).stat().st_mode & 0o777 for name in ("run.sh", "train.py")] == [0o500, 0o400]


def test_a_snapshot_that_is_there_is_not_missing(host: Host, source: Path) -> None:
    digests = [put_code(host, source).name, "0" * 64]
    assert ask(host, "store.missing", kind="code", sums=digests) == {"missing": ["0" * 64]}


def test_a_snapshot_that_is_asked_for_is_no_old_one(host: Host, source: Path) -> None:
    code = put_code(host, source)
    os.utime(code, (0, 0))
    ask(host, "store.missing", kind="code", sums=[code.name])
    assert code.stat().st_mtime > 0


def test_a_damaged_snapshot_is_missing_and_gets_replaced(host: Host, source: Path) -> None:
    code = put_code(host, source)
    (code / "train.py").chmod(0o600)
    (code / "train.py").write_text("print('changed')\n")
    assert ask(host, "store.missing", kind="code", sums=[code.name]) == {"missing": [code.name]}
    put_code(host, source)
    assert ask(host, "store.missing", kind="code", sums=[code.name]) == {"missing": []}


def test_a_snapshot_with_another_sum_is_refused(host: Host, source: Path) -> None:
    with pytest.raises(ClusterddpError, match=r"sum [0-9a-f]{12}, expected 000000000000"):
        ask(host, "store.put", stream(source), kind="code", sum="0" * 64)
    assert what_lies_in(host.root / "code") == {}


@pytest.mark.parametrize("name", [b"/etc/x", b"../x", b"a/../../x", b"a//b", b"a/.", b"", b"x\0y"])
def test_a_name_that_leads_out_is_refused(host: Host, name: bytes) -> None:
    with pytest.raises(ClusterddpError, match="leads out"):
        ask(host, "store.put", handmade(("file", name, b"")), kind="code", sum="0" * 64)
    assert what_lies_in(host.root / "code") == {}


@pytest.mark.parametrize("first", ["link", "file"])
def test_nothing_is_written_through_what_came_before(host: Host, tmp_path: Path, first: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = os.fsencode(outside) if first == "link" else b""
    data = handmade((first, b"a", link), ("file", b"a/x", b""))
    with pytest.raises(ClusterddpError, match="the stream has it twice"):
        ask(host, "store.put", data, kind="code", sum="0" * 64)
    assert what_lies_in(outside) == {}


@pytest.mark.parametrize(
    "data",
    [b"\x1f\x8b" + bytes(600), bytes(100), _HEAD.pack(9, 1, 0, 0) + b"x", handmade(("dir", b"d", b"content"))],
    ids=["gzip", "zeros", "device", "directory with content"],
)
def test_what_is_no_stream_of_files_is_refused(host: Host, data: bytes) -> None:
    with pytest.raises(ClusterddpError):
        ask(host, "store.put", data, kind="code", sum="0" * 64)
    assert what_lies_in(host.root / "code") == {}


def test_a_stream_that_ends_early_is_refused(host: Host, source: Path) -> None:
    with pytest.raises(ClusterddpError, match="the connection ended before the last file"):
        ask(host, "store.put", stream(source)[:-1], kind="code", sum=list_files(source).digest())
    assert what_lies_in(host.root / "code") == {}


def test_a_connection_that_ends_leaves_nothing(host: Host, source: Path) -> None:
    data = stream(source)
    with pytest.raises(EOFError):
        OPERATIONS["store.put"](
            host,
            {"kind": "code", "sum": list_files(source).digest()},
            Body(io.BytesIO(data[: len(data) // 2]), len(data)),
        )
    assert what_lies_in(host.root / "code") == {}


def test_two_may_send_one_snapshot_at_once(host: Host, source: Path) -> None:
    errors = in_threads(4, lambda: put_code(host, source))
    assert (errors, [path.name for path in (host.root / "code").iterdir()]) == ([], [list_files(source).digest()])


@pytest.mark.root
def test_a_full_disk_is_reported_and_left_as_it_was(host: Host, source: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", host.root / "code"], check=True)
    try:
        with pytest.raises(ClusterddpError, match=r"disk is full: 0\.1 MB are free, 0\.3 MB are needed"):
            put_code(host, source)
        assert what_lies_in(host.root / "code") == {}
    finally:
        subprocess.run(["umount", host.root / "code"], check=True)


@pytest.mark.root
def test_a_disk_that_runs_full_is_left_as_it_was(host: Host, source: Path) -> None:
    # Enough room for the bytes, too little for the number of the files.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=8", "tmpfs", host.root / "code"], check=True)
    try:
        with pytest.raises(ClusterddpError, match="disk is full"):
            put_code(host, source)
        assert what_lies_in(host.root / "code") == {}
    finally:
        subprocess.run(["umount", host.root / "code"], check=True)


def test_a_run_gets_its_code_as_hard_links(host: Host, source: Path) -> None:
    code = put_code(host, source)
    answer = ask(host, "store.checkout", sum=code.name, name="brisk-otter-3.01234567")
    copy = host.root / "runs" / "brisk-otter-3.01234567" / "code"
    assert (answer["code"], what_lies_in(copy)) == (str(copy), what_lies_in(source))
    assert (copy / "train.py").stat().st_ino == (code / "train.py").stat().st_ino


def test_a_run_keeps_the_code_that_it_has(host: Host, source: Path) -> None:
    code = put_code(host, source)
    for _ in range(2):
        ask(host, "store.checkout", sum=code.name, name="run.01234567")
        code.rename(host.root / "gone") if code.exists() else None
    assert what_lies_in(host.root / "runs" / "run.01234567") != {}


def test_a_missing_snapshot_is_reported(host: Host) -> None:
    with pytest.raises(ClusterddpError, match="is gone from this host"):
        ask(host, "store.checkout", sum="0" * 64, name="run.01234567")


# Data.


def test_data_arrives_as_it_is(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    assert what_lies_in(target) == what_lies_in(source)


def test_data_that_was_sent_is_the_same_by_size_and_time(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    assert compare(host, source, target) == {}


def test_only_what_is_absent_is_asked_for(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    (source / "more").write_text("more")
    assert compare(host, source, target) == {"absent": ["more"]}


def test_more_data_comes_beside_what_is_there(host: Host, source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "mine").write_text("mine")
    put_data(host, source, target)
    assert what_lies_in(target) == what_lies_in(source) | {"mine": b"mine"}


def test_found_data_is_the_same_by_its_sum(host: Host, source: Path, target: Path) -> None:
    target.parent.mkdir()
    subprocess.run(["cp", "-r", source, target], check=True)
    files = ["run.sh", f"sub/{STRANGE}", "sub/nothing", "train.py"]
    assert compare(host, source, target) == {"unsure": files}
    assert compare(host, source, target, sums=True) == {}
    assert compare(host, source, target) == {}


def test_found_data_is_never_replaced(host: Host, source: Path, target: Path) -> None:
    target.parent.mkdir()
    subprocess.run(["cp", "-r", source, target], check=True)
    compare(host, source, target, sums=True)
    (source / "train.py").write_text("print('a newer one')\n")
    assert compare(host, source, target) == {"other": ["train.py"]}
    with pytest.raises(ClusterddpError, match=r"train\.py: there is a file with other content"):
        put_data(host, source, target)
    assert (target / "train.py").read_text() == "print('hello')\n"


def test_sent_data_is_brought_up_to_date(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    (source / "train.py").write_text("print('a newer one')\n")
    assert compare(host, source, target) == {"changed": ["train.py"]}
    put_data(host, source, target)
    assert what_lies_in(target) == what_lies_in(source)


def test_sent_data_that_was_touched_there_is_not_replaced(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    (target / "train.py").write_text("print('mended on the host')\n")
    (source / "train.py").write_text("print('a newer one')\n")
    assert compare(host, source, target) == {"other": ["train.py"]}


def test_data_that_was_only_touched_here_is_the_same(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    (source / "train.py").touch()
    assert compare(host, source, target) == {"unsure": ["train.py"]}
    assert compare(host, source, target, sums=True) == {}


def test_a_conflict_touches_nothing_at_all(host: Host, source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "train.py").write_text("mine")
    with pytest.raises(ClusterddpError, match=r"train\.py: there is a file with other content \(4 bytes, 15 are"):
        put_data(host, source, target)
    assert what_lies_in(target) == {"train.py": b"mine"}


def test_nothing_is_ever_deleted(host: Host, source: Path, target: Path) -> None:
    put_data(host, source, target)
    (source / "train.py").unlink()
    listing = json.dumps(to_json(list_files(source).entries)).encode()
    assert ask(host, "store.compare", listing, target=str(target))["stale"] == ["train.py"]
    put_data(host, source, target)
    assert (target / "train.py").exists()


@pytest.mark.parametrize("way", ["file", "link", "directory"])
def test_a_file_in_the_way_of_a_directory_or_file_is_reported(host: Host, source: Path, target: Path, way: str) -> None:
    target.mkdir(parents=True)
    if way == "file":
        (target / "sub").write_text("mine")
    elif way == "link":
        (target / "elsewhere").mkdir()
        (target / "sub").symlink_to("elsewhere")
    else:
        (target / "train.py").mkdir()
    before = what_lies_in(target)
    words = "train.py: there is a directory already" if way == "directory" else "sub: there is something that is no dir"
    with pytest.raises(ClusterddpError, match=words):
        put_data(host, source, target)
    assert what_lies_in(target) == before


def test_a_file_in_the_place_of_the_target_is_reported(host: Host, source: Path, target: Path) -> None:
    target.parent.mkdir()
    target.write_text("mine")
    assert set(compare(host, source, target)) == {"other"}


def test_a_target_may_be_a_link_to_a_directory(host: Host, source: Path, target: Path) -> None:
    real = target.parent / "real"
    real.mkdir(parents=True)
    target.symlink_to(real)
    put_data(host, source, target)
    assert what_lies_in(real) == what_lies_in(source)


def test_a_link_that_leads_out_of_data_is_refused(host: Host, target: Path) -> None:
    with pytest.raises(ClusterddpError, match="leads out"):
        ask(host, "store.put", handmade(("link", b"d/l", b"../../x")), kind="data", target=str(target))
    assert not target.exists()


def test_the_home_of_the_host_is_meant_by_a_tilde(host: Host, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(host.root / "home"))
    put_data(host, source, Path("~/data"))
    assert what_lies_in(host.root / "home" / "data") == what_lies_in(source)


def test_a_place_without_write_permission_is_reported(host: Host, source: Path) -> None:
    with pytest.raises(ClusterddpError, match="/proc/nothing"):
        put_data(host, source, Path("/proc/nothing/data"))


def test_two_may_send_the_same_data_at_once(host: Host, source: Path, target: Path) -> None:
    errors = in_threads(4, lambda: put_data(host, source, target))
    assert (errors, what_lies_in(target)) == ([], what_lies_in(source))


def test_what_changed_while_it_was_sent_is_refused(host: Host, source: Path, target: Path) -> None:
    sending = FileStream(files=list_files(source))
    (source / "train.py").write_text("print('changed')\n")
    (source / "run.sh").unlink()
    data = b"".join(sending.chunks())
    with pytest.raises(ClusterddpError, match=r"run\.sh: it changed on the sender's side"):
        ask(host, "store.put", data, kind="data", target=str(target))
    assert sending.spoiled == [
        f"{source}/run.sh: cannot be read: No such file or directory",
        f"{source}/train.py: changed while it was sent",
    ]
    assert what_lies_in(target.parent) == {}


# Staging, marks.

WRITER = """
import sys
from pathlib import Path
from clusterddp.agent.storage import staging
with staging(Path(sys.argv[1])) as tree:
    (tree / "half").write_text("half")
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", WRITER, str(tmp_path)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_writer_left_is_removed_by_the_next(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with staging(tmp_path) as tree:
        assert list(tmp_path.iterdir()) == [tree.parent]


def test_what_a_living_writer_writes_is_left_to_it(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    with staging(tmp_path):
        assert len(list(tmp_path.iterdir())) == 2


def test_a_mark_is_seen_until_it_is_taken_away(host: Host, target: Path) -> None:
    here, there = "a" * 32, "b" * 32
    ask(host, "store.mark", nonce=here, target=str(target))
    assert ask(host, "store.seen", nonces=[here, there], target=str(target)) == {"seen": [here]}
    ask(host, "store.unmark")
    assert ask(host, "store.seen", nonces=[here], target=str(target)) == {"seen": []}


def in_threads(count: int, function: Any) -> list[BaseException]:
    """Call a function in threads at once; return what they raised."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
