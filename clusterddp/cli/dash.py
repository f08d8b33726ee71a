"""The dashboard: the pages of `report` over all runs, live, from a server for this machine that changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import click

from clusterddp.cli.arguments import command, runs_option
from clusterddp.cli.terminal import Terminal, say
from clusterddp.errors import ClusterddpError
from clusterddp.places.state import announce, read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import read_gang, read_run
from clusterddp.system.files import open_regular

if TYPE_CHECKING:
    from clusterddp.view.status import RunSummary

DEFAULT_PORT = 8271
LOOPBACK = "127.0.0.1"
_KEY = "X-Clusterddp-Key"
"""The header that has the key. A cookie would go to the other ports of this machine, too."""
_HOSTS = frozenset([LOOPBACK, "localhost"])
_MOST_COMPARED = 12
_LOG_BYTES = 256 * 1024
"""How much of a log one answer has; a longer log is read from so far before its end."""
_LIST_FOR_S = 2.0
"""So long the list of runs is taken as it was read: several pages may be open."""
_MAX_RECEIVING = 32
"""How many connections may send their requests at a time."""
_WITHIN_S, _MAX_REQUEST_BYTES = 5.0, 16 * 1024
"""How long a request may take to come, or a page waits for the list that another one reads; how large a request is."""


@command("dash")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", default=DEFAULT_PORT, show_default=True,
    help="0: any free port.",
)  # fmt: skip
@runs_option
@click.pass_obj
def dash(terminal: Terminal, *, port: int, runs_dir: Path) -> None:
    """Serve pages about all runs, for a browser on this machine: live, and only to read.

    The address that it prints has a key; without it the pages are closed to other users of the machine.
    Open it once in each tab.
    """
    server = DashServer(runs_dir, port=port, environ=terminal.environ)
    port = server.server_address[1]
    say(f"http://{LOOPBACK}:{port}/#{server.key}")
    if "SSH_CONNECTION" in terminal.environ:
        say(f"from your own machine first: ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}")
    say("Ctrl-C ends it; the runs go on")
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


COMMANDS = {"dash": dash}


class DashServer(ThreadingHTTPServer):
    """Answers a browser on this machine that knows the key.

    Raises: ClusterddpError: the port is in use.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, runs_dir: Path, *, port: int, environ: Mapping[str, str]) -> None:
        self.runs_dir = runs_dir.absolute()
        self.environ = environ
        self.key = secrets.token_urlsafe(24)
        self.runs = _Runs(self.runs_dir)
        self.receiving = threading.BoundedSemaphore(_MAX_RECEIVING)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ClusterddpError(
                f"port {port} of {LOOPBACK}: {error.strerror}", hint="--port 0 takes any free port"
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, once one of those that may send a request has a place."""
        self.receiving.acquire()  # the thread releases it when it has the request
        super().process_request(request, client_address)


class _Runs:
    """The summaries of all runs; one that has ended is read again only when its files have changed."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        self._read_at = -_LIST_FOR_S
        self._newest: list[RunSummary] = []
        self._total = 0
        self._ended: dict[Path, tuple[object, RunSummary]] = {}
        self._reading = runs_dir
        """What is being read now."""

    def read(self, limit: int) -> tuple[list[RunSummary], int]:
        """Return the newest runs, the newest first, and how many runs there are.

        Raises: TimeoutError: another page still reads them.
        """
        if not self._lock.acquire(timeout=_WITHIN_S):
            raise TimeoutError(f"{self._reading}: reading it takes longer than {_WITHIN_S:g} s")
        try:
            if time.monotonic() - self._read_at >= _LIST_FOR_S:
                self._reading = self._runs_dir
                self._newest, self._total = self._read(limit)
                self._read_at = time.monotonic()
            return self._newest, self._total
        finally:
            self._lock.release()

    def _read(self, limit: int) -> tuple[list[RunSummary], int]:
        from clusterddp.view.status import read_summary

        runs = list_runs(self._runs_dir)
        newest = runs[: -limit - 1 : -1]
        stamps = {}
        for run in newest:
            self._reading = run.path
            stamps[run.path] = _stamp(run)
        known = {path: found for path, found in self._ended.items() if stamps.get(path) == found[0]}
        records = []
        for run in newest:
            if run.path not in known:
                self._reading = run.path
                with contextlib.suppress(ClusterddpError, OSError, TypeError):
                    records.append((run, read_run(run)))
        announce(records)
        read = {}
        for run, record in records:
            self._reading = run.path
            with contextlib.suppress(ClusterddpError, OSError, TypeError):
                view = read_state(run, record=record)
                read[run.path] = read_summary(run, record=record, view=view)
        ended = {path: (stamps[path], summary) for path, summary in read.items() if summary.state.finished}
        self._ended = known | ended
        found = {path: summary for path, (_, summary) in known.items()} | read
        return [found[run.path] for run in newest if run.path in found], len(runs)


class _Handler(BaseHTTPRequestHandler):
    """One request: the host and the key are checked before anything is read."""

    server: DashServer
    server_version, sys_version = "clusterddp", ""
    timeout = _WITHIN_S

    def handle(self) -> None:
        """Receive the request before anything of it is interpreted; the browser may go away at any time."""
        try:
            head = self._receive()
        finally:
            self.server.receiving.release()
        with contextlib.suppress(OSError):
            if len(head) > _MAX_REQUEST_BYTES:
                self.wfile.write(b"HTTP/1.0 431 Request Header Fields Too Large\r\n\r\n")
                return
            self.rfile = io.BytesIO(head)
            super().handle()

    def _receive(self) -> bytes:
        """Receive the head of a request; empty: it did not come in time."""
        head, deadline = b"", time.monotonic() + _WITHIN_S
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in head and len(head) <= _MAX_REQUEST_BYTES:
                self.connection.settimeout(max(0.001, deadline - time.monotonic()))
                if not (data := self.connection.recv(4096)):
                    break
                head += data
            self.connection.settimeout(self.timeout)
            return head
        return b""

    def do_GET(self) -> None:
        from clusterddp.cli.page import pages

        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        key = self.headers.get(_KEY)
        if host not in _HOSTS:  # a page of another site that has its own name lead here
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 and localhost only")
        elif key is None:  # its script asks again, with the key
            self._send(pages.draw_empty(), "text/html; charset=utf-8")
        elif not hmac.compare_digest(key.encode(), self.server.key.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "another key: open the address that clusterddp dash has printed")
        else:
            self._answer()

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: the terminal is the user's."""

    def _answer(self) -> None:
        try:
            url = urlsplit(self.path)
            path, query = url.path, parse_qs(url.query)
            if path == "/bytes":
                self._send(json.dumps(self._read_log(query)), "application/json")
            elif page := self._page(path, query):
                self._send(page, "text/html; charset=utf-8")
            else:
                self._refuse(HTTPStatus.NOT_FOUND, f"no such page: {path}")
        except TimeoutError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; does its storage answer?")
        except Exception as error:  # of one run; the server goes on for all others
            message = error.message if isinstance(error, ClusterddpError) else str(error)
            self._refuse(HTTPStatus.NOT_FOUND, message)

    def _page(self, path: str, query: Mapping[str, list[str]]) -> str | None:
        from clusterddp.cli.page import pages

        server = self.server
        if path == "/":
            summaries, total = server.runs.read(pages.MOST_RUNS)
            return pages.draw_runs(summaries, total=total, directory=str(server.runs_dir), now=time.time())
        if path not in {"/run", "/compare", "/log"}:
            return None
        runs = [self._find(name) for name in query.get("run", [])[:_MOST_COMPARED]]
        if not runs:
            raise ClusterddpError("check a run first")
        ranks = range(read_gang(runs[0]).world_size)
        if path == "/log":
            rank, stream = _rank_and_stream(query)
            return pages.draw_log(runs[0].name, rank, stream, ranks=ranks)
        from clusterddp.view.report import read_reports

        reports = read_reports(runs, server.environ)
        return pages.draw_reports(reports, ranks=ranks)

    def _read_log(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        """Return what a log has behind `offset`, and where it ends now."""
        run = self._find(query["run"][0])
        rank, stream = _rank_and_stream(query)
        attempt = run.newest_attempt()
        path = attempt.stderr(rank) if stream == "err" else attempt.stdout(rank)
        offset = int(query.get("offset", ["0"])[0])
        try:
            file = open_regular(path)
        except FileNotFoundError:
            return {"offset": 0, "text": ""}
        with file:
            size = file.seek(0, os.SEEK_END)
            begin = offset if 0 <= offset <= size else 0
            file.seek(max(begin, size - _LOG_BYTES))
            return {"offset": size, "text": file.read(_LOG_BYTES).decode("utf-8", errors="replace")}

    def _find(self, name: str) -> RunDir:
        """Find a run below the server's directory only.

        Raises: ClusterddpError: there is none.
        """
        return find_run(self.server.runs_dir, name.replace(os.sep, "?"))

    def _send(self, text: str, kind: str) -> None:
        data = text.encode("utf-8", errors="backslashreplace")
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        unchanged = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if unchanged else HTTPStatus.OK)
        self._headers(kind, 0 if unchanged else len(data), tag)
        if not unchanged:
            self.wfile.write(data)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        data = f"{text}\n".encode("utf-8", errors="backslashreplace")
        self.send_response(status)
        self._headers("text/plain; charset=utf-8", len(data))
        self.wfile.write(data)

    def _headers(self, kind: str, length: int, tag: str | None = None) -> None:
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(length)),
            ("ETag", tag),
            ("Cache-Control", "no-cache"),
            ("Vary", _KEY),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            if value is not None:
                self.send_header(name, value)
        self.end_headers()


def _rank_and_stream(query: Mapping[str, list[str]]) -> tuple[int, str]:
    return int(query["rank"][0]), "err" if query.get("stream", ["out"])[0] == "err" else "out"


def _stamp(run: RunDir) -> object:
    """Return what changes when a run goes on: the times of its record, its attempts, its metrics and its end."""
    stamps = []
    for path in (run.record, run.path / "attempts", run.metrics, run.events):
        with contextlib.suppress(OSError):
            stamps.append((path.name, path.stat().st_mtime_ns))
    return tuple(stamps)
