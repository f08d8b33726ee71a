"""The server of `dash`: who may ask, what it answers, and that it only reads."""

from __future__ import annotations

import html
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.cli.dash import DashServer
from clusterddp.errors import ClusterddpError
from tests.support.handmade_runs import complete, make_run, start_attempt, train


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DashServer]:
    (tmp_path / "runs").mkdir()
    with DashServer(tmp_path / "runs", port=0, environ={}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Answer:
    """The answer to one request."""

    def __init__(self, server: DashServer, path: str, *, key: bool = True, method: str = "GET", **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
        cookie = {"Cookie": f"other=1; clusterddp_dash={server.key}"} if key else {}
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=cookie | names)
        response = connection.getresponse()
        self.status, self.headers, self.text = response.status, response.headers, response.read().decode()
        connection.close()

    @property
    def main(self) -> str:
        return self.text.partition("<main>")[2].partition("</main>")[0]


def test_without_the_key_nothing_is_read(server: DashServer) -> None:
    for path in ("/", "/run?run=x", "/bytes?run=x&rank=0", "/?key=wrong", "/nowhere"):
        assert Answer(server, path, key=False).status == 403
    assert Answer(server, "/", key=False, Cookie="clusterddp_dash=").status == 403


def test_the_printed_address_gives_a_cookie_and_leads_to_an_address_without_the_key(server: DashServer) -> None:
    answer = Answer(server, f"/?key={server.key}", key=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    assert answer.headers["Set-Cookie"] == f"clusterddp_dash={server.key}; HttpOnly; SameSite=Strict; Path=/"


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
