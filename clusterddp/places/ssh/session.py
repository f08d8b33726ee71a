"""The session with the agent on one host: what starts it, the requests and the answers, one at a time.

A host needs only Python: it is sent a constant command, the boot (boot.py), and this package as a zip file.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import clusterddp
from clusterddp.errors import NonsenseError, SshError
from clusterddp.places.ssh.agent.operations import HELLO, OPERATIONS
from clusterddp.places.ssh.config import Destination
from clusterddp.places.ssh.keys import HostKey
from clusterddp.planning.ssh import SshNode, constant_command
from clusterddp.system.own_directory import SAFE_DIRECTORIES
from clusterddp.system.templates import list_templates
from clusterddp.wire import build, read_object

if TYPE_CHECKING:
    import paramiko

BOOT_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 18
_PACKET_BYTES = 32 * 1024 - 64
"""The largest packet that sshd accepts, less paramiko's header."""
MAX_PREFACE_BYTES = 256 * 1024
"""How much a login shell may print before the agent's first line."""
_MAX_LINE_BYTES, _MAX_DATA_BYTES = 4 << 20, 8 << 20
"""The largest answer: a line of JSON takes fifty times its size of memory; the data are pieces of files."""
MARK = b"clusterddp-agent "
NO_PACKAGE = 86
"""The exit code of `ssh_argv` where the host does not have the package."""
_READS = "IFS= read -r python && IFS= read -r venv && IFS= read -r conda && IFS= read -r modules || exit 96; "
_RUNS = '"import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"\''
"""What the constant command does with standard input, at its beginning and at its end."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_packing = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What is sent to every host: the program that starts the agent, and this package as a zip file."""

    boot: bytes
    sha256: str
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """Data that goes with a request."""

    size: int
    chunks: Iterable[bytes]


@dataclass(kw_only=True, slots=True)
class Reply:
    """The answer of a host."""

    facts: dict[str, Any]
    data: bytes = b""


@functools.cache
def package() -> Package:
    """Return what is uploaded; the same sources give the same checksum."""
    home = Path(clusterddp.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        sources = [path for pattern in ("*.py", "*.css", "*.js", "*.sh") for path in sorted(home.rglob(pattern))]
        names = {path: path.relative_to(home).as_posix() for path in sources}
        names |= {path: f"templates/{path.name}" for path in list_templates()}  # submits on a login node need them
        names |= _carried()
        for path, name in names.items():
            info = zipfile.ZipInfo(f"clusterddp/{name}", date_time=_LONG_AGO)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    data = buffer.getvalue()
    boot = [home / "system" / "own_directory.py", home / "places" / "ssh" / "agent" / "boot.py"]
    return Package(
        boot=b"\n".join(path.read_bytes() for path in boot),
        sha256=hashlib.sha256(data).hexdigest(),
        data=data,
    )


def greeting(node: SshNode, **more: Any) -> bytes:
    """Return what the constant command reads: what chooses the Python, the boot, and the boot's order, with `more`."""
    with _packing:  # else every thread makes it
        sent = package()
    lines = (node.python, node.venv, node.conda, " ".join(node.modules), str(len(sent.boot)))
    order = {"package": sent.sha256, "root": node.root, "safe": os.environ.get(SAFE_DIRECTORIES, ""), **more}
    return "".join(f"{line or ''}\n" for line in lines).encode() + sent.boot + json.dumps(order).encode() + b"\n"


def _carried() -> dict[Path, str]:
    """Return what a function from Python needs on a host that has not got it: path -> name in the archive.

    These are cloudpickle (BSD licence) and, of submitit (MIT licence), the module of `DelayedSubmission`; run/call.py
    takes them.
    """
    wanted = {"cloudpickle": "cloudpickle/*.py", "submitit": "submitit/core/utils.py"}
    found = {}
    for package_name, pattern in wanted.items():
        for file in importlib.metadata.files(package_name) or ():
            if file.match(pattern) or (".dist-info" in file.parts[0] and file.name.startswith("LICENSE")):
                found[Path(str(file.locate()))] = f"carried/{file.as_posix()}"
    return found


def ssh_argv(node: SshNode, module: str, arguments: Sequence[str], *, terminal: bool) -> list[str]:
    """Return the user's own ssh, which runs a module of the package on a host; see `NO_PACKAGE`.

    It leaves standard input to the module: what the constant command reads from there is a part of it. `module` has a
    function `main(arguments)`; one that begins with ~/ is in the home directory there.
    """
    home = f"{node.root}/packages/{package().sha256}"
    program = (
        "import sys, os\n"
        f"home = os.path.expanduser({home!r})\n"
        f"os.path.isdir(home) or sys.exit({NO_PACKAGE})\n"
        "sys.path.insert(0, home)\n"
        f"from {module} import main\n"
        f"main([os.path.expanduser({arguments[0]!r}), *{list(arguments[1:])!r}])\n"
    )
    values = {"python": node.python, "venv": node.venv, "conda": node.conda, "modules": " ".join(node.modules)}
    # printf reads each character that a shell might as its number.
    given = "".join(f"{name}=$(printf {_numbered(value or '')}); " for name, value in values.items())
    body = constant_command().removesuffix(_RUNS).partition(_READS)[2]
    code = base64.b64encode(program.encode()).decode()
    command = f"exec /bin/sh -c '{given}{body}\"import base64, sys; exec(base64.b64decode(sys.argv.pop()))\" {code}'"
    options = ["-t" if terminal else "-T", "-o", "RemoteCommand=none"]
    return ["ssh", *options, "--", node.host, command]


class Below(Protocol):
    """What carries a connection: a socket, or the session with a jump host, which others may share."""

    def close(self) -> object: ...


@dataclass(kw_only=True)
class Session:
    """A connection to one host, and the agent there once it was started; made by `Connector`. The caller closes it."""

    destination: Destination
    key: HostKey
    transport: paramiko.Transport
    below: Below
    channel: paramiko.Channel | None = None
    """The agent's standard streams; None: it was not started."""
    hello: dict[str, Any] = field(default_factory=dict)
    """The boot's first answer: facts of the host."""
    _users: int = 1
    """How many hold the connection; the last `close` closes it."""
    _unread: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users_lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self,
        do: str,
        facts: Mapping[str, Any] | None = None,
        *,
        body: bytes | Upload = b"",
        timeout_s: float = 30.0,
    ) -> Reply:
        """Send the agent a request, and wait for its answer.

        `timeout_s`: how long the host may send or accept no byte.
        Raises: SshError: the host refuses, with its reason; or the connection has broken.
        """
        upload = body if isinstance(body, Upload) else Upload(size=len(body), chunks=[body] if body else [])
        with self._lock:
            return self._ask(do, facts or {}, upload, timeout_s)

    def send_heartbeat(self, timeout_s: float) -> None:
        """Send the agent a heartbeat, unless another thread's request is in progress, which counts as one.

        Raises: SshError: the connection has broken.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._ask("beat", {}, Upload(size=0, chunks=[]), timeout_s)
        finally:
            self._lock.release()

    @property
    def host(self) -> str:
        """The host, as the user names it."""
        return self.destination.host

    @property
    def _agent(self) -> paramiko.Channel:
        assert self.channel is not None, "start_agent comes first"
        return self.channel

    def measure_round_trip_s(self) -> float:
        """Open a channel on the host, and return how long its answer took.

        Raises: SshError.
        """
        from clusterddp.places.ssh.transport import open_channel

        start = time.monotonic()
        with open_channel(self.transport, self.destination):
            return time.monotonic() - start

    def retain(self) -> bool:
        """Share an open connection; return False when it is closed already."""
        with self._users_lock:
            if self._users == 0 or not self.transport.is_active():
                return False
            self._users += 1
            return True

    def close(self) -> None:
        """Release the connection; the last user closes it, and what carries it. The agent exits."""
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self.break_off()
        self.transport.close()
        self.below.close()

    def break_off(self) -> None:
        """End the agent, which discards what it has received of a request; who waits for it gets an error."""
        if self.channel is not None:
            self.channel.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start_agent(self, node: SshNode) -> None:
        """Start the agent: send the boot, and the package where the host does not have it.

        Raises: SshError.
        """
        from clusterddp.places.ssh.transport import execute

        self.channel = execute(self.transport, self.destination, constant_command())
        with contextlib.suppress(SshError):  # when the shell has exited, the reason is on its stderr
            self._send(greeting(node), BOOT_TIMEOUT_S)
        self.hello = self.read_marked(HELLO, BOOT_TIMEOUT_S)
        if not self.hello["have"]:
            self._send_line({"size": len(package().data)}, BOOT_TIMEOUT_S)
            self._send(package().data, BOOT_TIMEOUT_S)
            self.read_marked({}, BOOT_TIMEOUT_S)

    def read_marked(self, keys: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Read a line of the boot, which holds these keys; skip what a login shell prints before it.

        Raises: SshError.
        """
        preface = b""
        while True:
            try:
                line = self._read_line(timeout_s)
            except SshError as error:
                self._raise_start_error(preface, error)
            if line.startswith(MARK):
                answer = self._parse(line[len(MARK) :])
                if not answer.pop("ok", False):
                    raise SshError(self.host, "start", str(answer.get("error")))
                return self._build(keys, answer)
            preface += line
            if len(preface) > MAX_PREFACE_BYTES:
                self._raise_start_error(preface, None)

    def _ask(self, do: str, facts: Mapping[str, Any], upload: Upload, timeout_s: float) -> Reply:
        self._send_line({"do": do, **facts, "size": upload.size}, timeout_s)
        try:
            for chunk in upload.chunks:
                self._send(chunk, timeout_s)
        except BaseException:  # the agent waits for the rest: the end of the connection makes it discard what it has
            self.break_off()
            raise
        answer = self._parse(self._read_line(timeout_s))
        size = answer.pop("size", 0)
        if not isinstance(size, int) or not 0 <= size <= _MAX_DATA_BYTES:
            self._reject(f"{size!r:.40} bytes of data")
        data = self._read_data(size, timeout_s)
        if not answer.pop("ok", False):
            raise SshError(self.host, "ask", str(answer.get("error")), hint=_text(answer.get("hint")))
        return Reply(facts=self._build(OPERATIONS[do].answer, answer), data=data)

    def _raise_start_error(self, preface: bytes, error: SshError | None) -> NoReturn:
        """Raise why the agent did not start: the last line that the host printed, where there is one."""
        printed = (preface + self._read_stderr()).decode(errors="replace").strip().splitlines()
        too_much = f"its login shell printed more than {MAX_PREFACE_BYTES:,} bytes"
        found = printed[-1].removeprefix("clusterddp: ") if printed else (error.found if error else too_much)
        hint = "python, venv or conda of the spec, and ssh.modules, choose the Python on the host"
        raise SshError(self.host, "start", found, hint=hint) from error

    def _read_stderr(self) -> bytes:
        deadline = time.monotonic() + 1.0
        while not self._agent.recv_stderr_ready() and time.monotonic() < deadline and not self._agent.eof_received:
            time.sleep(0.02)
        return self._agent.recv_stderr(65536) if self._agent.recv_stderr_ready() else b""

    def _send_line(self, message: Mapping[str, Any], timeout_s: float) -> None:
        self._send(json.dumps(message).encode() + b"\n", timeout_s)

    def _send(self, data: bytes, timeout_s: float) -> None:
        try:
            self._agent.settimeout(timeout_s)
            for start in range(0, len(data), _PACKET_BYTES):  # paramiko copies what is left after each packet
                self._agent.sendall(data[start : start + _PACKET_BYTES])
        except OSError as error:
            self._raise_broken(error, timeout_s)

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            return read_object(line)
        except ValueError as error:
            self._reject(str(error), error)

    def _build(self, keys: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        try:
            return build(keys, answer, "answer")  # type: ignore[no-any-return]
        except ValueError as error:
            self._reject(str(error), error)

    def _reject(self, what: str, error: Exception | None = None) -> NoReturn:
        """Close the session after an invalid answer: where the next one begins is not known."""
        self.break_off()
        raise NonsenseError(self.host, what) from error

    def _read_line(self, timeout_s: float) -> bytes:
        chunks, size, chunk = [], 0, self._unread
        while b"\n" not in chunk:
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_LINE_BYTES:
                self._reject(f"more than {_MAX_LINE_BYTES:,} bytes in a line")
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
            self._agent.settimeout(timeout_s)
            data = self._agent.recv(_CHUNK_BYTES)
        except OSError as error:
            self._raise_broken(error, timeout_s)
        if not data:
            raise SshError(self.host, "ask", self._explain_end(), dropped=True)
        return data

    def _explain_end(self) -> str:
        last = self._read_stderr().decode(errors="replace").strip().rpartition("\n")[2]
        end = "its agent has exited" if self.transport.is_active() else "the connection broke"
        return f"{end}: {last}" if last else end

    def _raise_broken(self, error: OSError, timeout_s: float) -> NoReturn:
        self.break_off()  # else a late answer would be read as the answer to the next request
        cause = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error) or "it has ended"
        raise SshError(self.host, "ask", f"the connection broke: {cause}", dropped=True) from error


def _numbered(text: str) -> str:
    """Write a text as the argument of printf in a command for any login shell."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode()) + '"'


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
