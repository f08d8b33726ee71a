"""Hosts without a network: the real agent in a process of its own, spoken to over pipes, each with its own root.

What happens to a connection (it breaks, it hangs, it cannot be made) is done here; everything behind it is real.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clusterddp.errors import SshError
from clusterddp.places.ssh.config import Destination
from clusterddp.places.ssh.keys import HostKey
from clusterddp.places.ssh.session import Reply, Session
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.planning.ssh import SshNode, SshPlan, directory_name
from clusterddp.run.cleanup import find_processes
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import ProcessIdentity, RunRecord, write_rank, write_run
from clusterddp.run.seal import sealed
from clusterddp.system.files import write_json
from tests.support.handmade_runs import make_gang, rank_record
from tests.support.paths import ROOT as PACKAGE

SERVE = "import sys; from clusterddp.places.ssh.agent.main import serve; serve(*sys.argv[1:], patience_s=600)"
SLEEP = "import time; time.sleep(600)"


class Channel(socket.socket):
    """Stands for the SSH channel to a host: one end of a pair of sockets."""

    eof_received = True

    def recv_stderr_ready(self) -> bool:
        return False


def stand_ins(host: str) -> dict[str, Any]:
    """Return what a session has besides its channel: it stands for an SSH connection."""
    nothing = SimpleNamespace(is_active=lambda: False, close=lambda: None)
    destination = Destination(host=host, hostname=host, port=22, user="u")
    return {"destination": destination, "key": HostKey(type="", blob=b""), "transport": nothing, "below": nothing}


def make_channel() -> tuple[Channel, socket.socket]:
    """Return a channel, and the host's end of it."""
    ours, theirs = socket.socketpair()
    return Channel(fileno=ours.detach()), theirs


class AgentSession(Session):
    """The real agent of a host, at the other end of a pair of sockets."""

    def __init__(self, host: str, root: Path, before_ask: Callable[[str], object]) -> None:
        channel, theirs = make_channel()
        super().__init__(**stand_ins(host), channel=channel)
        self.before_ask = before_ask
        self.asked: list[str] = []
        self.received_bytes = 0
        """Of files."""
        with theirs:
            argv = [sys.executable, "-c", SERVE, str(root), str(PACKAGE)]
            self.process = subprocess.Popen(argv, stdin=theirs, stdout=theirs)

    def ask(self, do: str, facts: Mapping[str, Any] | None = None, **rest: Any) -> Reply:
        self.before_ask(do)
        self.asked.append(do)
        reply = super().ask(do, facts, **rest)
        self.received_bytes += len(reply.data)
        return reply

    def close(self) -> None:
        super().close()
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass(kw_only=True)
class Hosts:
    """Some hosts, one run on them, and its copy here."""

    directory: Path
    names: tuple[str, ...]
    down: set[str] = dataclasses.field(default_factory=set)
    """Hosts that cannot be connected to."""
    sessions: list[AgentSession] = dataclasses.field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)
    before_ask: Callable[[str], object] = lambda do: None
    """Called with each request before it is sent."""
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def run(self) -> RunDir:
        return RunDir(self.directory / "home" / "brisk-otter-3")

    @property
    def token(self) -> str:
        return "0123456789abcdef" + self.directory.name.encode().hex()

    def on(self, host: str) -> RunDir:
        """Return the run's directory on a host."""
        return RunDir(self.directory / host / "runs" / directory_name(self.run.name, self.token))

    @property
    def head(self) -> RunDir:
        return self.on(self.names[0])

    def open(self, access: SshNode) -> AgentSession:
        if access.host in self.down:
            raise SshError(access.host, "connect", "timed out", hint="is it up?")
        session = AgentSession(access.host, self.directory / access.host, self.before_ask)
        self.sessions.append(session)
        return session

    def sync(self, *runs: RunDir) -> Synchroniser:
        return Synchroniser(
            runs or [self.run], os.environ, report=self.said.append, interval_s=0.0, open_session=self.open
        )

    def look(self) -> None:
        """Ask once, as a command does that is not going to watch."""
        sync = self.sync()
        sync.update()
        sync.close()

    def fetch(self) -> bool:
        sync = self.sync()
        done = sync.download()
        sync.close()
        return done

    def logs(self, *ranks: int, first_attempt: int | None = None) -> None:
        sync = self.sync()
        sync.want_logs(ranks, first_attempt)
        sync.update_logs()
        sync.close()

    def break_links(self) -> None:
        for session in self.sessions:
            session.process.kill()

    def process(self, role: str) -> subprocess.Popen[bytes]:
        """Start a process that has a role in the run; it does nothing."""
        cookie = f"{self.token}.{role}"
        process = subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {"CLUSTERDDP_COOKIE": cookie})
        self.processes.append(process)
        deadline = time.monotonic() + 20
        while not find_processes(cookie):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def start(self, number: int = 0, *, head: int = 0) -> list[AttemptDir]:
        """Start an attempt on all hosts, as the supervisors would; return its directory on each."""
        attempts = []
        for node_rank, host in enumerate(self.names):
            attempt = self.on(host).attempt(number)
            attempt.ranks.mkdir(parents=True, exist_ok=True)
            attempt.logs.mkdir(exist_ok=True)
            for rank in (2 * node_rank, 2 * node_rank + 1):
                write_rank(attempt, dataclasses.replace(rank_record(rank), host=host))
            attempts.append(attempt)
        nodes = sorted(range(len(self.names)), key=lambda node_rank: node_rank != head)
        start = {"attempt": number, "supervisor": dataclasses.asdict(ProcessIdentity.of())}
        write_json(attempts[head].start, start | {"nodes": [{"node_rank": node_rank} for node_rank in nodes]})
        return attempts


@contextmanager
def running_hosts(
    directory: Path, *names: str, fetch: Iterable[str] = ("logs", "metrics"), min_nodes: int | None = None
) -> Iterator[Hosts]:
    hosts = Hosts(directory=directory, names=names)
    run = hosts.run
    for place in (run.checkpoints, run.launcher_dir, run.attempt(0).ranks, run.attempt(0).logs):
        place.mkdir(parents=True)
    for name in names:
        for place in (hosts.on(name).checkpoints, hosts.on(name).launcher_dir):
            place.mkdir(parents=True)
    gang = make_gang(nodes=len(names))
    nodes = tuple(dataclasses.replace(node, host=host) for node, host in zip(gang.nodes, names, strict=True))
    ssh = SshPlan(
        hosts=tuple(SshNode(host=host, node_rank=number, gpus=0) for number, host in enumerate(names)),
        root="~/.clusterddp",
        fetch=tuple(fetch),
    )
    gang = dataclasses.replace(gang, nodes=nodes, run=run.name, token=hosts.token, min_nodes=min_nodes)
    write_json(run.plan, sealed({"run": run.name, "gang": gang.to_json(), "ssh": ssh.to_json(), "spec": {}}))
    record = RunRecord(
        run=run.name, token=hosts.token, name="t", launcher="ssh", created_ns=time.time_ns(), job_id=f"7@{names[0]}"
    )
    write_run(run, record)
    try:
        yield hosts
    finally:
        for session in hosts.sessions:
            session.close()
        for process in hosts.processes:
            hosts.kill(process)
