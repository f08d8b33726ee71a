"""A webhook on loopback that keeps what it gets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/services/T0/hunter2"
"""The part of its address that is a secret."""


class Webhook(ThreadingHTTPServer):
    """Answers each POST with `status`; a context manager."""

    daemon_threads = True

    def __init__(self, status: int = 200, location: str = "", port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.status = status
        self.location = location
        self.received: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{PATH}"

    def __enter__(self) -> Webhook:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.received.append(json.loads(body or "{}"))
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *arguments: object) -> None:
        """Keep standard error clean."""
