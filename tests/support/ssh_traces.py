"""Processes of hosts on a LAN and of runs there, looked at from outside."""

from __future__ import annotations

from pathlib import Path

from clusterddp.run.directory import RunDir
from tests.support.ssh_kill_kinds import CHILD, NODES, ORPHAN
from tests.support.ssh_place import SshPlace
from tests.testbed.rack import Rack


def is_up(place: SshPlace, run: RunDir) -> bool:
    """Say whether all ranks of a run are there, with what they start."""
    if not place.host_run_dir(NODES[0], run).attempt(0).start.exists():
        return False
    commands = [each.command for each in place.all_processes(place.record(run).token)]
    return commands.count(CHILD) == commands.count(ORPHAN) == 4


def sshd_sessions(rack: Rack, host: str) -> list[int]:
    """List the sshd processes that serve a connection."""
    return [
        pid for pid in rack.pids(host) if command_of(pid).startswith(b"sshd: ") and b"listener" not in command_of(pid)
    ]


def sshd_listener(rack: Rack, host: str) -> list[int]:
    return [pid for pid in rack.pids(host) if b"sshd" in command_of(pid) and b"[listener]" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def rank_of(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
