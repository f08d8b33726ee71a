"""What a submit uploads to hosts over SSH, and what it does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.upload import note_left_out, read_data
from clusterddp.system.file_set import list_files
from tests.support.ssh_person import SshPerson
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

STRANGE = os.fsdecode(b"caf\xe9.py")
UPLOAD = """
import json, os, sys, time
from pathlib import Path
from clusterddp.errors import ClusterddpError
from clusterddp.places.ssh.upload import upload_run
from clusterddp.planning.ssh import SshNode
from clusterddp.places.ssh.sessions import open_sessions
order = json.loads(sys.argv[1])
code = Path(order["run"]) / "code"
code = code.resolve() if code.is_symlink() else None
accesses = [SshNode(host=host, root=root, python=sys.executable) for host, root in order["hosts"].items()]
sessions = open_sessions(accesses, environ=os.environ)
watched = []
def watch(progress):
    watched.append([str(progress), progress.sent_bytes, progress.total_bytes])
    if order["spoil"]:
        Path(order["spoil"]).write_text("changed")
    if order["stall"]:
        print("under way", flush=True)
        time.sleep(1000)
try:
    uploaded = upload_run(sessions, code=code, send=order["send"].items(), watch=watch)
    answer = {"sent": uploaded.sent_bytes, "notes": uploaded.notes}
except ClusterddpError as error:
    answer = {"error": error.message, "hint": error.hint}
print(json.dumps(answer | {"watched": watched}))
"""


@dataclass(kw_only=True)
class Sender:
    """A run on the head of a rack, whose hosts have directories of their own unless they are said to share one."""

    person: SshPerson
    run: Path
    send: dict[str, str] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=lambda: {"node1": "~/one", "node2": "~/two"})

    @property
    def home(self) -> Path:
        return self.person.rack.dir / "home" / "root"

    def argv(self, *, spoil: Path | None = None, stall: bool = False) -> list[str]:
        order = {"hosts": self.roots, "send": self.send, "run": str(self.run), "stall": stall}
        order["spoil"] = str(spoil) if spoil else None
        return self.person.rack.argv(
            "head", [sys.executable, "-c", UPLOAD, json.dumps(order)], env=self.person.variables()
        )

    def upload(self, **how: Any) -> dict[str, Any]:
        done = subprocess.run(self.argv(**how), check=False, capture_output=True, text=True, timeout=120)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def left_over(self) -> list[Path]:
        """Return what is half on its way, and marks."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # it was just removed
                return list(self.home.rglob(".clusterddp-*"))


@pytest.fixture
def sender(person: SshPerson, tmp_path: Path) -> Iterator[Sender]:
    """A run with a snapshot that has all that a snapshot may have."""
    code = tmp_path / "code"
    (code / "sub").mkdir(parents=True)
    (code / "train.py").write_text("print('hello')\n")
    (code / "run.sh").write_text("#!/bin/sh\n")
    (code / "run.sh").chmod(0o755)
    (code / "sub" / STRANGE).write_bytes(b"x" * 3_000_000)
    (code / "link").symlink_to("sub")
    digest = list_files(code).digest()
    store = tmp_path / ".code"
    store.mkdir()
    code.rename(store / digest)
    run = tmp_path / "run"
    run.mkdir()
    (run / "code").symlink_to(f"../.code/{digest}")
    sender = Sender(person=person, run=run)
    yield sender
    for name in ("one", "two", "data"):
        # An agent that has just started may still write what Python compiles.
        wait_until(lambda name=name: subprocess.run(["rm", "-rf", sender.home / name], check=False).returncode == 0, 20)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    (data / "train" / "empty").mkdir(parents=True)
    (data / "train" / "a.bin").write_bytes(b"a" * 3_000_000)
    (data / "z.bin").write_bytes(b"z" * 2_000_000)
    return data


def code_at(sender: Sender, root: str) -> Path:
    return sender.home / root / "code" / (sender.run / "code").resolve().name


def test_every_host_has_the_code_of_the_run(sender: Sender) -> None:
    sender.upload()
    sums = {list_files(code_at(sender, root)).digest() for root in ("one", "two")}
    assert sums == {(sender.run / "code").resolve().name}


def test_a_second_submit_sends_nothing(sender: Sender, data: Path) -> None:
    sender.send = {str(data): "~/data/set"}
    first, second = sender.upload(), sender.upload()
    assert first["sent"] > 8_000_000
    assert (second["sent"], second["watched"]) == (0, [])


def test_hosts_that_share_their_files_get_them_once(sender: Sender, data: Path) -> None:
    sender.roots = {"node1": "~/one", "node2": "~/one"}
    sender.send = {str(data): "~/data/set"}
    uploaded = sender.upload()
    assert 8_000_000 < uploaded["sent"] < 8_100_000


def test_data_is_sent_once_to_a_place_that_hosts_share(sender: Sender, data: Path) -> None:
    sender.send = {str(data): "~/data/set"}
    uploaded = sender.upload()
    assert (sender.home / "data" / "set" / "train" / "a.bin").stat().st_size == 3_000_000
    assert 11_000_000 < uploaded["sent"] < 11_100_000  # 3 MB of code to both, 5 MB of data to one


def test_a_file_may_have_another_name_on_hosts(sender: Sender, data: Path) -> None:
    sender.send = {str(data / "z.bin"): "~/data/here/y.bin", str(data / "train" / "a.bin"): "~/data/here/"}
    sender.upload()
    found = {path.name: path.stat().st_size for path in (sender.home / "data" / "here").iterdir()}
    assert found == {"y.bin": 2_000_000, "a.bin": 3_000_000}
    assert sender.upload()["sent"] == 0


def test_a_run_without_a_snapshot_sends_no_code(sender: Sender) -> None:
    (sender.run / "code").unlink()
    uploaded = sender.upload()
    assert uploaded["sent"] == 0


def test_the_progress_is_reported(sender: Sender) -> None:
    words, sent, total = sender.upload()["watched"][-1]
    assert (words, sent) == ("sending 6.0 MB to 2 hosts", total)


def test_other_content_on_a_host_is_left_and_nothing_is_sent(sender: Sender, data: Path) -> None:
    place = sender.home / "data" / "set"
    place.mkdir(parents=True)
    (place / "z.bin").write_bytes(b"mine")
    sender.send = {str(data): "~/data/set"}
    error = sender.upload()["error"]
    assert f"{place}/z.bin: there is a file with other content (4 bytes, 2000000 are to come); it is left" in error
    assert [path.name for path in place.iterdir()] == ["z.bin"]


def test_what_is_newer_here_is_brought_up_to_date_and_said(sender: Sender, data: Path) -> None:
    sender.send = {str(data): "~/data/set"}
    sender.upload()
    (data / "z.bin").write_bytes(b"new")
    (data / "train" / "a.bin").unlink()
    place = sender.home / "data" / "set"
    assert sender.upload()["notes"] == [
        f"node1:{place}: 1 file sent earlier brought up to date",
        f"node1:{place}: sent earlier, no longer in {data}, left there: train/a.bin",
    ]
    assert (place / "z.bin").read_bytes() == b"new"


def test_a_file_that_changes_while_it_is_sent_is_named(sender: Sender, data: Path) -> None:
    (sender.run / "code").unlink()
    sender.send = {str(data): "~/data/set"}
    uploaded = sender.upload(spoil=data / "z.bin")
    assert uploaded["error"] == f"{data}/z.bin: changed while it was sent"
    assert (list((sender.home / "data").iterdir()), sender.left_over()) == ([], [])


def test_a_snapshot_that_was_changed_is_refused_by_every_host(sender: Sender) -> None:
    (sender.run / "code" / "run.sh").write_text("#!/bin/bash\n")
    assert "node1: ask: the snapshot of the code has the sum" in sender.upload()["error"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_sender_that_ends_in_the_middle_leaves_nothing_half(sender: Sender, data: Path, how: signal.Signals) -> None:
    (sender.run / "code").unlink()
    sender.send = {str(data): "~/data/set"}
    process = subprocess.Popen(sender.argv(stall=True), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    wait_until(lambda: sender.left_over() != [], 20)
    end_program(process, how)
    wait_until(lambda: sender.left_over() == [], 20)
    assert not (sender.home / "data" / "set").exists()


def test_a_full_disk_is_reported_with_its_host(sender: Sender, data: Path) -> None:
    small = sender.home / "data"
    small.mkdir()
    sender.send = {str(data): "~/data/set"}
    rack = sender.person.rack
    rack.run("node2", ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)])
    try:
        uploaded = sender.upload()
        rack.run("node2", ["test", "!", "-e", f"{small}/set"])
    finally:
        rack.run("node2", ["umount", str(small)])
    assert uploaded["error"] == f"node2: ask: {small}/set: the disk is full: 1.0 MB are free, 5.0 MB are needed"


def test_a_place_of_its_own_on_each_host_is_distinguished_from_a_shared_one(sender: Sender, data: Path) -> None:
    own = sender.home / "data"
    own.mkdir()
    (sender.run / "code").unlink()
    sender.roots = {"node1": "~/one", "node2": "~/one"}
    sender.send = {str(data): "~/data/set"}
    rack = sender.person.rack
    rack.run("node2", ["mount", "-t", "tmpfs", "none", str(own)])
    try:
        uploaded = sender.upload()
        rack.run("node2", ["test", "-e", f"{own}/set/z.bin"])
    finally:
        rack.run("node2", ["umount", str(own)])
    assert uploaded["sent"] > 10_000_000


@pytest.mark.parametrize("link", ["/etc/hostname", "../elsewhere"])
def test_a_link_that_leads_out_of_what_is_sent_is_refused(data: Path, link: str) -> None:
    (data / "train" / "out").symlink_to(f"../{link}" if link.startswith("..") else link)
    with pytest.raises(ClusterddpError, match="outside of what is sent"):
        read_data(data, "~/data")


def test_what_is_neither_file_nor_link_is_left_out_and_said(data: Path) -> None:
    os.mkfifo(data / "pipe")
    _, files = read_data(data, "~/data")
    assert note_left_out(files) == [f"{data}: not sent, being neither files nor links: pipe"]


def end_program(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Signal what was started on the head: it is a child of the command that entered there."""
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(pid), how)
    process.communicate(timeout=240)
