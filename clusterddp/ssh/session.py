"""A conversation with the agent on a host: the constant command, the boot, then requests and answers, one at a time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from clusterddp.errors import ClusterddpError, NonsenseError, PreflightError, SshError
from clusterddp.ssh.connect import connect_all
from clusterddp.ssh.connection import Connection
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.wire import build, read_object

if TYPE_CHECKING:
    import paramiko

BOOT_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 18
_PACKET_BYTES = 32 * 1024 - 64
"""What sshd takes in one packet, less paramiko's allowance."""
_MAX_PREFACE = 256 * 1024
"""How much a login shell may print before the agent speaks."""
_MAX_LINE_BYTES, _MAX_DATA_BYTES = 32 << 20, 64 << 20
"""What an agent's answer may have: the files of a run are listed in one line, the pieces of files are its data."""
_MARK = b"clusterddp-agent "


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAccess:
    """A host, and which Python on it."""

    host: str
    python: str | None = None
    venv: str | None = None
    conda: str | None = None
    modules: tuple[str, ...] = ()
    root: str = "~/.clusterddp"
    host_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What every host runs: the program that starts the agent, and this package as a zip file."""

    command: str
    """The one constant command."""
    boot: bytes
    sha256: str
    data: bytes
    hello: Mapping[str, Any]
    """What the boot says first: key -> type, for `wire.build`."""
    answers: Mapping[str, Mapping[str, Any]]
    """What the agent answers to each operation; to others nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """Data that goes with a request."""

    size: int
    chunks: Iterable[bytes]


@dataclass(kw_only=True, slots=True)
class Reply:
    """What a host answered."""

    facts: dict[str, Any]
    data: bytes = b""


@dataclass(kw_only=True)
class Session:
    """The agent of one host; made by `open_sessions`, closed by whoever holds it."""

    host: str
    connection: Connection
    channel: paramiko.Channel
    answers: Mapping[str, Mapping[str, Any]]
    hello: dict[str, Any] = field(default_factory=dict)
    """What the host said of itself."""
    _unread: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self,
        do: str,
        facts: Mapping[str, Any] | None = None,
        *,
        body: bytes | Upload = b"",
        timeout_s: float = 30.0,
    ) -> Reply:
        """Ask the agent to do something, and wait for its answer.

        `timeout_s`: how long nothing may come.
        Raises: SshError: the host refuses, with its reason; or the connection has broken.
        """
        upload = body if isinstance(body, Upload) else Upload(size=len(body), chunks=[body] if body else [])
        with self._lock:
            return self._ask(do, facts or {}, upload, timeout_s)

    def beat(self, timeout_s: float) -> None:
        """Give the agent a sign of life; whoever is speaking to it at this moment does so already.

        Raises: SshError: the connection has broken.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._ask("beat", {}, Upload(size=0, chunks=[]), timeout_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the conversation; the agent leaves."""
        self.channel.close()
        self.connection.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def begin(self, access: HostAccess, package: Package) -> None:
        """Have the host run our package, which is sent when it does not have it.

        Raises: SshError.
        """
        lines = (access.python, access.venv, access.conda, " ".join(access.modules))
        order = {"package": package.sha256, "root": access.root}
        with contextlib.suppress(SshError):  # a shell that has left already may have said why
            self._send(
                b"".join(f"{line or ''}\n".encode() for line in lines)
                + f"{len(package.boot)}\n".encode()
                + package.boot
                + json.dumps(order).encode()
                + b"\n",
                BOOT_TIMEOUT_S,
            )
        self.hello = self.read_marked(package.hello, BOOT_TIMEOUT_S)
        if not self.hello["have"]:
            self._send_line({"size": len(package.data)}, BOOT_TIMEOUT_S)
            self._send(package.data, BOOT_TIMEOUT_S)
            self.read_marked({}, BOOT_TIMEOUT_S)

    def read_marked(self, keys: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Read a line of the boot, which holds these keys; what a login shell prints before it is passed over.

        Raises: SshError.
        """
        preface = b""
        while True:
            try:
                line = self._read_line(timeout_s)
            except SshError as error:
                self._explain(preface, error)
            if line.startswith(_MARK):
                answer = self._parse(line[len(_MARK) :])
                if not answer.pop("ok", False):
                    raise SshError(self.host, "start", str(answer.get("error")))
                return self._build(keys, answer)
            preface += line
            if len(preface) > _MAX_PREFACE:
                self._explain(preface, None)

    def _ask(self, do: str, facts: Mapping[str, Any], upload: Upload, timeout_s: float) -> Reply:
        self._send_line({"do": do, **facts, "size": upload.size}, timeout_s)
        for chunk in upload.chunks:
            self._send(chunk, timeout_s)
        answer = self._parse(self._read_line(timeout_s))
        size = answer.pop("size", 0)
        if not isinstance(size, int) or not 0 <= size <= _MAX_DATA_BYTES:
            self._nonsense(f"{size!r:.40} bytes of data")
        data = self._read_data(size, timeout_s)
        if not answer.pop("ok", False):
            raise SshError(self.host, "ask", str(answer.get("error")), hint=_text(answer.get("hint")))
        return Reply(facts=self._build(self.answers.get(do, {}), answer), data=data)

    def _explain(self, preface: bytes, error: SshError | None) -> NoReturn:
        """Raise why the agent did not start, in the words of the host."""
        said = (preface + self._read_stderr()).decode(errors="replace").strip().splitlines()
        words = said[-1].removeprefix("clusterddp: ") if said else (error.found if error else "it printed a lot")
        hint = "ssh.python, venv, conda or modules of the spec say which Python the host is to take"
        raise SshError(self.host, "start", words, hint=hint) from error

    def _read_stderr(self) -> bytes:
        deadline = time.monotonic() + 1.0
        while not self.channel.recv_stderr_ready() and time.monotonic() < deadline and not self.channel.eof_received:
            time.sleep(0.02)
        return self.channel.recv_stderr(65536) if self.channel.recv_stderr_ready() else b""

    def _send_line(self, words: Mapping[str, Any], timeout_s: float) -> None:
        self._send(json.dumps(words).encode() + b"\n", timeout_s)

    def _send(self, data: bytes, timeout_s: float) -> None:
        try:
            self.channel.settimeout(timeout_s)
            for start in range(0, len(data), _PACKET_BYTES):  # paramiko copies what is left after each packet
                self.channel.sendall(data[start : start + _PACKET_BYTES])
        except OSError as error:
            self._broken(error, timeout_s)

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            return read_object(line)
        except ValueError as error:
            self._nonsense(str(error), error)

    def _build(self, keys: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        try:
            return build(keys, answer, "answer")  # type: ignore[no-any-return]
        except ValueError as error:
            self._nonsense(str(error), error)

    def _nonsense(self, what: str, error: Exception | None = None) -> NoReturn:
        """Give the conversation up: what follows cannot be told from what it answers."""
        self.channel.close()
        raise NonsenseError(self.host, what) from error

    def _read_line(self, timeout_s: float) -> bytes:
        chunks, size, chunk = [], 0, self._unread
        while b"\n" not in chunk:
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_LINE_BYTES:
                self._nonsense(f"more than {_MAX_LINE_BYTES:,} bytes in a line")
            chunk = self._receive(timeout_s)
        last, newline, self._unread = chunk.partition(b"\n")
        return b"".join((*chunks, last, newline))

    def _read_data(self, size: int, timeout_s: float) -> bytes:
        kept = []
        while size:
            received = self._unread or self._receive(timeout_s)
            chunk, self._unread = received[:size], received[size:]
            size -= len(chunk)
            kept.append(chunk)
        return b"".join(kept)

    def _receive(self, timeout_s: float) -> bytes:
        try:
            self.channel.settimeout(timeout_s)
            data = self.channel.recv(_CHUNK_BYTES)
        except OSError as error:
            self._broken(error, timeout_s)
        if not data:
            raise SshError(self.host, "ask", self._why_left(), dropped=True)
        return data

    def _why_left(self) -> str:
        last = self._read_stderr().decode(errors="replace").strip().rpartition("\n")[2]
        left = "its agent has left" if self.connection.transport.is_active() else "the connection broke"
        return f"{left}: {last}" if last else left

    def _broken(self, error: OSError, timeout_s: float) -> NoReturn:
        self.channel.close()  # a late answer would be taken for that to the next question
        words = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error) or "it has ended"
        raise SshError(self.host, "ask", f"the connection broke: {words}", dropped=True) from error


def open_sessions(
    accesses: Sequence[HostAccess], *, environ: Mapping[str, str], package: Package, at_once: int = AT_ONCE
) -> dict[str, Session | SshError]:
    """Connect to hosts and start the agent on each; a result per host, whoever gets the sessions closes them."""
    by_host = {access.host: access for access in accesses}
    pinned = {access.host: access.host_key for access in accesses if access.host_key}
    connections = connect_all(by_host, environ=environ, pinned=pinned, at_once=at_once)

    def start(host: str) -> Session | SshError:
        connection = connections[host]
        return connection if isinstance(connection, SshError) else start_session(connection, by_host[host], package)

    return Fan(by_host, start, close_if_open).results(at_once)


def start_session(connection: Connection, access: HostAccess, package: Package) -> Session | SshError:
    """Start the agent over a connection, which is closed when that fails."""
    try:
        channel = connection.execute(package.command)
        session = Session(host=access.host, connection=connection, channel=channel, answers=package.answers)
        session.begin(access, package)
    except SshError as error:
        connection.close()
        return error
    except BaseException:
        connection.close()
        raise
    return session


def ask_all(
    sessions: Mapping[str, Session],
    do: str,
    facts: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
    *,
    timeout_s: float = 30.0,
) -> dict[str, Reply | SshError]:
    """Ask many hosts the same, some tens at once; `facts` may depend on the host. A result per host."""

    def ask(host: str) -> Reply | SshError:
        try:
            return sessions[host].ask(do, facts(host) if callable(facts) else facts, timeout_s=timeout_s)
        except SshError as error:
            return error

    return Fan(sessions, ask, lambda result: None).results(AT_ONCE)


def raise_for(errors: Collection[ClusterddpError], trouble: str = "cannot be used") -> None:
    """Raise one error for all hosts that failed, if any did; `trouble` says of several what they have in common."""
    first = next(iter(errors), None)
    if first is None:
        return
    if len({error.message for error in errors}) == 1:
        raise first
    lines = [error.message + (f"\n    hint: {error.hint}" if error.hint else "") for error in errors]
    raise PreflightError("\n  ".join([f"{len(errors)} hosts {trouble}:", *lines])) from first


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def close_if_open(result: Session | SshError) -> None:
    if isinstance(result, Session):
        result.close()
