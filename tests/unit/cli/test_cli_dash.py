"""The server of `dash`: who may ask, what it answers, and that it only reads."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.cli.dash import DashServer
from clusterddp.errors import ClusterddpError
from tests.support.browser import dashboard
from tests.support.handmade_runs import complete, make_run, start_attempt, train
from tests.support.storage_faults import hung
from tests.support.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DashServer]:
    (tmp_path / "runs").mkdir()
    with dashboard(tmp_path / "runs") as server:
        yield server


class Answer:
    """The answer to one request."""

    def __init__(self, server: DashServer, path: str, *, key: bool = True, method: str = "GET", **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
        own = {"X-Clusterddp-Key": server.key} if key else {}
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=own | names)
        response = connection.getresponse()
        self.status, self.headers, self.text = response.status, response.headers, response.read().decode()
        connection.close()

    @property
    def main(self) -> str:
        return self.text.partition("<main>")[2].partition("</main>")[0]


def test_without_the_key_nothing_is_read(server: DashServer) -> None:
    make_run(server.runs_dir, "brisk-otter-3")
    empty = Answer(server, "/nowhere", key=False).text
    assert "open the address that clusterddp dash has printed" in html.unescape(empty)
    for path in ("/", "/run?run=brisk-otter-3", "/bytes?run=brisk-otter-3&rank=0", f"/?key={server.key}"):
        assert Answer(server, path, key=False).text == empty
        assert Answer(server, path, key=False, Cookie=f"clusterddp_dash={server.key}").text == empty
        assert Answer(server, path, key=False, X_Clusterddp_Key="wrong").status == 403
        assert Answer(server, path, key=False, X_Clusterddp_Key="").status == 403


def test_no_answer_has_the_key_or_a_cookie(server: DashServer) -> None:
    for key in (True, False):
        answer = Answer(server, "/", key=key)
        assert "Set-Cookie" not in answer.headers
        assert server.key not in answer.text
        assert answer.headers["Vary"] == "X-Clusterddp-Key"


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:9", 200), ("127.0.0.1", 200), ("evil.example:80", 403), ("", 403)]
)
def test_a_site_that_leads_its_own_name_here_is_refused(server: DashServer, host: str, status: int) -> None:
    assert Answer(server, "/", Host=host).status == status


def test_it_listens_on_loopback_only_and_knows_no_other_method(server: DashServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for method in ("POST", "PUT", "DELETE"):
        assert Answer(server, "/", method=method).status == 501
    with pytest.raises(ClusterddpError, match="Address already in use"):
        DashServer(server.runs_dir, port=server.server_address[1], environ={})


def test_pages_are_answered_anew_only_when_they_have_changed(server: DashServer) -> None:
    run = make_run(server.runs_dir, "brisk-otter-3")
    train(run, steps=100)
    complete(run, start_attempt(run))
    first = Answer(server, "/run?run=brisk-otter-3")
    assert (first.status, "brisk-otter-3" in first.main) == (200, True)
    assert "connect-src 'self'" in html.unescape(first.text)
    assert Answer(server, "/run?run=brisk-otter-3", If_None_Match=first.headers["ETag"]).status == 304
    train(run, steps=200)
    assert Answer(server, "/run?run=brisk-otter-3", If_None_Match=first.headers["ETag"]).status == 200


def test_a_log_is_answered_from_an_offset_on(server: DashServer) -> None:
    attempt = start_attempt(make_run(server.runs_dir, "brisk-otter-3"))
    attempt.stdout(1).write_bytes(b"one\n")
    ask = "/bytes?run=brisk-otter-3&rank=1&offset="
    assert json.loads(Answer(server, f"{ask}0").text) == {"offset": 4, "text": "one\n"}
    attempt.stdout(1).write_bytes(b"one\ntw\xffo\n")
    assert json.loads(Answer(server, f"{ask}4").text) == {"offset": 9, "text": "tw\ufffdo\n"}
    attempt.stdout(1).write_bytes(b"new\n")
    assert json.loads(Answer(server, f"{ask}9").text) == {"offset": 4, "text": "new\n"}
    attempt.stdout(0).write_bytes(b"x" * 3_000_000)
    assert len(json.loads(Answer(server, "/bytes?run=brisk-otter-3&rank=0").text)["text"]) == 256 * 1024


def test_only_runs_below_the_directory_are_read(server: DashServer, tmp_path: Path) -> None:
    outside = start_attempt(make_run(tmp_path / "others", "calm-fox-1"))
    outside.stdout(0).write_text("not yours\n")
    start_attempt(make_run(server.runs_dir, "brisk-otter-3"))
    for query in (f"run={tmp_path}/others/calm-fox-1", "run=../others/calm-fox-1"):
        answer = Answer(server, f"/bytes?{query}&rank=0")
        assert (answer.status, "not yours" in answer.text) == (404, False)
    for path in ("/run?run=no", "/bytes?run=brisk-otter-3&rank=../0", "/bytes", "/compare", "/compare?run=no"):
        assert Answer(server, path).status == 404


def test_the_list_follows_a_run_that_ends_and_one_that_is_resumed(
    server: DashServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterddp.cli.dash._LIST_FOR_S", 0.0)
    run = make_run(server.runs_dir, "brisk-otter-3")
    attempt = start_attempt(run)
    assert "RUNNING" in Answer(server, "/").main
    complete(run, attempt)
    for _ in range(2):
        assert "COMPLETED" in Answer(server, "/").main
    start_attempt(run, 1)
    assert "RUNNING" in Answer(server, "/").main


def connect(server: DashServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20)


def test_a_stranger_who_says_little_holds_few_connections_and_for_seconds_only(server: DashServer) -> None:
    before = threading.active_count()
    strangers = [connect(server) for _ in range(60)]
    begun = time.monotonic()
    try:
        for sock in strangers[:40]:
            sock.sendall(b"GET / HTTP/1.1\r\n")
        while time.monotonic() < begun + 3:
            strangers[0].sendall(b"A")  # a byte now and then makes it no longer
            time.sleep(0.1)
        assert threading.active_count() - before <= 32
        assert strangers[0].recv(1) == b""
        assert time.monotonic() < begun + 8
        assert Answer(server, "/").status == 200
    finally:
        for sock in strangers:
            sock.close()


def test_headers_are_bounded_before_the_key_is_asked_for(server: DashServer) -> None:
    with connect(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(100):
                sock.sendall(b"A: " + b"x" * 60_000 + b"\r\n")
            pytest.fail("6 MB were read")
    assert Answer(server, "/", Cookie="of-another-port=" + "x" * 8000).status == 200
    assert Answer(server, "/", Cookie="of-another-port=" + "x" * 40_000).status == 431


def test_a_run_whose_storage_hangs_is_named_and_holds_no_page_of_another_run(server: DashServer) -> None:
    for name in ("calm-fox-1", "brisk-otter-3"):
        start_attempt(make_run(server.runs_dir, name))
    with hung(server.runs_dir / "brisk-otter-3" / "attempts"):
        answers: list[Answer] = []
        for _ in range(2):
            threading.Thread(target=lambda: answers.append(Answer(server, "/")), daemon=True).start()
        wait_until(lambda: answers)
        assert answers[0].status == 503
        assert "brisk-otter-3" in answers[0].text
        assert Answer(server, "/run?run=calm-fox-1").status == 200
    wait_until(lambda: len(answers) == 2)
    assert Answer(server, "/").status == 200


def test_no_request_writes_to_the_terminal(server: DashServer, capfd: pytest.CaptureFixture[str]) -> None:
    start_attempt(make_run(server.runs_dir, "brisk-otter-3"))
    for path in (
        "/bytes?run=brisk-otter-3&rank=" + "9" * 5000,
        "//[",
        "/run?run=%00",
        "/bytes?run=brisk-otter-3&rank=-1",
    ):
        assert Answer(server, path).status in {200, 404}
        assert Answer(server, path, key=False).status == 200
    with connect(server) as sock:  # gone before the answer
        sock.sendall(f"GET /bytes?run=x HTTP/1.0\r\nHost: localhost\r\nX-Clusterddp-Key: {server.key}\r\n\r\n".encode())
    assert Answer(server, "/").status == 200
    assert capfd.readouterr().err == ""
