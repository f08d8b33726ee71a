"""What hosts keep of what is sent to them: snapshots of code by their sum, data at places of the user's choice."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.agent.main import HANDLERS
from clusterddp.places.ssh.agent.operations import Body, Host, Reply
from clusterddp.places.ssh.agent.store import _ABANDONED_S, check_out, staging
from clusterddp.system.archive import Archive
from clusterddp.system.file_set import list_files, to_json

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
    answer = HANDLERS[do](host, {"sum": None, "target": None} | facts, Body(io.BytesIO(body), len(body)))
    return answer.facts | json.loads(b"".join(answer.chunks)) if isinstance(answer, Reply) else answer


def archive_of(root: Path) -> bytes:
    archive = Archive(files=list_files(root))
    data = b"".join(archive.chunks())
    assert len(data) == archive.size
    return data


def handmade(*members: tuple[bytes, bytes, str]) -> bytes:
    """Make an archive of (type, name, link or nothing); files are empty."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for kind, name, link in members:
            info = tarfile.TarInfo(name.decode())
            info.type, info.linkname = kind, link
            archive.addfile(info)
    return data.getvalue()


FILE, LINK, HARD_LINK, DEVICE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE


def put_code(host: Host, root: Path) -> Path:
    digest = list_files(root).digest()
    ask(host, "store.put", archive_of(root), sum=digest)
    return host.root / "code" / digest


def is_missing(host: Host, digest: str) -> bool:
    return bool(ask(host, "store.compare", sum=digest)["missing"])


def put_data(host: Host, root: Path, target: Path) -> None:
    ask(host, "store.put", archive_of(root), target=str(target))


def compare(host: Host, root: Path, target: Path, *, sums: bool = False) -> dict[str, list[str]]:
    """Return the names for each verdict."""
    files = list_files(root)
    if sums:
        files = files.with_sums(number for number, entry in enumerate(files.entries) if entry.is_file)
    entries = files.entries
    answer = ask(host, "store.compare", json.dumps(to_json(entries)).encode(), target=str(target))
    verdicts = ("absent", "unsure", "changed", "other")
    found = {verdict: [os.fsdecode(entries[int(number)].name) for number in answer[verdict]] for verdict in verdicts}
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
    assert [is_missing(host, digest) for digest in digests] == [False, True]


def test_a_snapshot_that_is_asked_for_is_no_old_one(host: Host, source: Path) -> None:
    code = put_code(host, source)
    os.utime(code, (0, 0))
    is_missing(host, code.name)
    assert code.stat().st_mtime > 0


def test_a_damaged_snapshot_is_missing_and_gets_replaced(host: Host, source: Path) -> None:
    code = put_code(host, source)
    (code / "train.py").chmod(0o600)
    (code / "train.py").write_text("print('changed')\n")
    assert is_missing(host, code.name)
    put_code(host, source)
    assert not is_missing(host, code.name)


def test_a_snapshot_with_another_sum_is_refused(host: Host, source: Path) -> None:
    with pytest.raises(ClusterddpError, match=r"sum [0-9a-f]{12}, expected 000000000000"):
        ask(host, "store.put", archive_of(source), sum="0" * 64)
    assert what_lies_in(host.root / "code") == {}


@pytest.mark.parametrize("name", [b"/etc/x", b"../x", b"a/../../x", b"a//b", b"a/."])
def test_a_name_that_leads_out_is_refused(host: Host, name: bytes) -> None:
    with pytest.raises(ClusterddpError, match="leads out"):
        ask(host, "store.put", handmade((FILE, name, "")), sum="0" * 64)
    assert what_lies_in(host.root / "code") == {}


@pytest.mark.parametrize("first", ["link", "file"])
def test_nothing_is_written_through_what_came_before(host: Host, tmp_path: Path, first: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    data = handmade((LINK, b"a", str(outside)) if first == "link" else (FILE, b"a", ""), (FILE, b"a/x", ""))
    with pytest.raises(ClusterddpError, match="the archive has it twice"):
        ask(host, "store.put", data, sum="0" * 64)
    assert what_lies_in(outside) == {}


@pytest.mark.parametrize(
    "data",
    [b"\x1f\x8b" + bytes(600), bytes(100), handmade((DEVICE, b"x", "")), handmade((HARD_LINK, b"x", "/etc/passwd"))],
    ids=["gzip", "zeros", "device", "hard link"],
)
def test_what_is_no_archive_of_files_is_refused(host: Host, data: bytes) -> None:
    with pytest.raises(ClusterddpError):
        ask(host, "store.put", data, sum="0" * 64)
    assert what_lies_in(host.root / "code") == {}


def test_an_archive_that_ends_early_is_refused(host: Host, source: Path) -> None:
    with pytest.raises(ClusterddpError, match=r"an incomplete archive \(unexpected end of data\)"):
        ask(host, "store.put", archive_of(source)[:100_000], sum=list_files(source).digest())
    assert what_lies_in(host.root / "code") == {}


def test_a_connection_that_ends_leaves_nothing(host: Host, source: Path) -> None:
    data = archive_of(source)
    with pytest.raises(EOFError):
        HANDLERS["store.put"](
            host,
            {"sum": list_files(source).digest(), "target": None},
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
    run = host.root / "runs" / "brisk-otter-3.01234567"
    check_out(host, code.name, run)
    copy = run / "code"
    assert what_lies_in(run) == {"code": "/"} | {f"code/{name}": at for name, at in what_lies_in(source).items()}
    assert (copy / "train.py").stat().st_ino == (code / "train.py").stat().st_ino


def test_a_run_keeps_the_code_that_it_has(host: Host, source: Path) -> None:
    code = put_code(host, source)
    for _ in range(2):
        check_out(host, code.name, host.root / "runs" / "run.01234567")
        code.rename(host.root / "gone") if code.exists() else None
    assert what_lies_in(host.root / "runs" / "run.01234567") != {}


def test_a_missing_snapshot_is_reported(host: Host) -> None:
    with pytest.raises(ClusterddpError, match="is gone from this host"):
        check_out(host, "0" * 64, host.root / "runs" / "run.01234567")


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


def test_data_that_another_host_has_put_into_shared_storage_is_the_same(
    host: Host, source: Path, target: Path, tmp_path: Path
) -> None:
    put_data(host, source, target)
    another = Host(root=tmp_path / "another", package=host.root, patience_s=60)
    assert compare(another, source, target) == {}


def test_who_has_not_sent_a_file_names_it_as_the_one_who_has(
    host: Host, source: Path, target: Path, tmp_path: Path
) -> None:
    put_data(host, source, target)
    (source / "train.py").write_text("print('a newer one')\n")
    another = Host(root=tmp_path / "another", package=host.root, patience_s=60)
    listing = json.dumps(to_json(list_files(source).entries)).encode()
    here, there = (ask(each, "store.compare", listing, target=str(target)) for each in (host, another))
    assert here["changed"] == there["other"] != {}


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
    words = "train.py: there is a directory already" if way == "directory" else "sub: there is something that is not"
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
        ask(host, "store.put", handmade((LINK, b"d/l", "../../x")), target=str(target))
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


@pytest.mark.parametrize("how", ["changed while it was sent", "cannot be read: No such file or directory"])
def test_what_changes_while_it_is_sent_is_named(source: Path, how: str) -> None:
    archive = Archive(files=list_files(source))
    (source / "train.py").unlink()
    if "changed" in how:
        (source / "train.py").write_text("print('changed')\n")
    with pytest.raises(ClusterddpError, match=rf"train\.py: {how}"):
        list(archive.chunks())


# Staging.


def test_what_a_killed_writer_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    left = tmp_path / ".clusterddp-incoming-0123" / "tree"
    left.mkdir(parents=True)
    long_ago = time.time() - _ABANDONED_S - 60
    mark = tmp_path / ".clusterddp-mark-0123"
    mark.touch()
    for place in (left.parent, mark):
        os.utime(place, (long_ago, long_ago))
    with staging(tmp_path) as tree:
        assert list(tmp_path.iterdir()) == [tree.parent]


def test_what_a_living_writer_writes_is_left_to_it(tmp_path: Path) -> None:
    with staging(tmp_path), staging(tmp_path):
        assert len(list(tmp_path.iterdir())) == 2


def test_a_writer_lives_while_bytes_arrive(tmp_path: Path) -> None:
    body = Body(io.BytesIO(b"x"), 1)
    with staging(tmp_path, body) as tree:
        os.utime(tree.parent, (0, 0))
        body.read()
        assert tree.parent.stat().st_mtime > 0


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
