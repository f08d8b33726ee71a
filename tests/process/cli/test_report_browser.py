"""The page of `report` in a real browser: what a person sees, hovers over and clicks, and what a hostile run can do."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from clusterddp.cli.dash import DashServer
from clusterddp.cli.main import main
from clusterddp.run.directory import RunDir
from clusterddp.system.files import append_jsonl, read_json, write_json
from tests.support.browser import Page, browser_page, dashboard
from tests.support.handmade_runs import complete, fail, make_run, start_attempt, train
from tests.support.waiting import wait_until

HOSTILE = "</script></style></title><img src=x onerror=alert(1)><script>alert(2)</script>\"' onload=alert(3) \x1b[31m"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def two_runs(tmp_path: Path) -> list[RunDir]:
    runs = [make_run(tmp_path / "runs", name) for name in ("brisk-otter-3", "calm-heron-4")]
    for run, steps in zip(runs, (100, 60), strict=True):
        train(run, steps=steps)
        complete(run, start_attempt(run))
    return runs


def report(tmp_path: Path, *names: str) -> Path:
    out = tmp_path / "page.html"
    assert main(["report", *names, "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    return out


def colors_of(png: bytes) -> set[bytes]:
    """Return pixels of a picture as they are stored, mostly as differences; enough to recognise a blank one."""
    width, _, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) in {(8, 2), (8, 6)}
    size = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    raw = zlib.decompress(data)
    return {raw[begin : begin + size] for begin in range(1, len(raw) - size, width * size + 1)} | {
        raw[begin : begin + size] for begin in range(1, min(len(raw) - size, 200_000), size)
    }


def test_the_browser_sees_a_script_and_a_request(page: Page, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(f"<body>{HOSTILE}<img src='http://127.0.0.1:9/x.png'>")
    page.open(bad)
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    assert page.complaints() != []
    assert "http://127.0.0.1:9/x.png" in page.requests()


def test_the_page_loads_nothing_and_logs_nothing(page: Page, two_runs: list[RunDir], tmp_path: Path) -> None:
    for names in (["brisk-otter-3"], ["brisk-otter-3", "calm-heron-4"]):
        page.open(report(tmp_path, *names))
        assert page.requests() == []
        assert page.complaints() == []


def test_a_person_reads_states_values_and_differences(page: Page, two_runs: list[RunDir], tmp_path: Path) -> None:
    plan = read_json(two_runs[1].plan)
    assert isinstance(plan, dict)
    write_json(two_runs[1].plan, plan | {"spec": {"train": {"lr": 0.2}}})
    page.open(report(tmp_path, "brisk-otter-3", "calm-heron-4"))
    text = page.evaluate("document.body.innerText")
    for words in ("brisk-otter-3", "calm-heron-4", "COMPLETED", "60.00%", "55.00%", "train.lr", "0.2"):
        assert words in text


def test_a_chart_reads_out_its_values_under_the_mouse(page: Page, two_runs: list[RunDir], tmp_path: Path) -> None:
    page.open(report(tmp_path, "brisk-otter-3", "calm-heron-4"))
    box = "document.querySelector('svg[data-x]').getBoundingClientRect()"
    x, y, width, height = page.evaluate(f"(r => [r.x, r.y, r.width, r.height])({box})")
    page.move_mouse(x + width - 1, y + height / 2)
    shown = page.evaluate("document.querySelector('figure output').textContent")
    # The loss is 2 / step: 0.02 at step 100, read off with the precision of a picture.
    line = next(line for line in shown.split("\n") if line.startswith("brisk-otter-3 train"))
    value = float(line.split(": ")[1].split(" ")[0])
    assert line.endswith("at step 100")
    assert value == pytest.approx(0.02, abs=0.01)


def test_the_keyboard_moves_the_read_out(page: Page, two_runs: list[RunDir], tmp_path: Path) -> None:
    page.open(report(tmp_path, "brisk-otter-3"))
    page.evaluate("document.querySelector('svg[data-x]').focus()")
    page.ask("Input.dispatchKeyEvent", type="keyDown", key="Home")
    shown = page.evaluate("document.querySelector('figure output').textContent")
    assert "at step 1\n" in f"{shown}\n"


def test_a_click_hides_a_run(page: Page, two_runs: list[RunDir], tmp_path: Path) -> None:
    page.open(report(tmp_path, "brisk-otter-3", "calm-heron-4"))
    visible = "[...document.querySelectorAll('figure polyline.r1')].filter(e => e.getBoundingClientRect().width).length"
    assert page.evaluate(visible) > 0
    page.click("input[data-run='1']")
    assert page.evaluate(visible) == 0
    assert page.evaluate(visible.replace(".r1", ".r0")) > 0


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (390, True)])
def test_the_page_is_drawn_on_desktop_and_phone(
    page: Page, two_runs: list[RunDir], tmp_path: Path, width: int, dark: bool
) -> None:
    page.open(report(tmp_path, "brisk-otter-3", "calm-heron-4"), width=width, dark=dark)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(colors_of(page.screenshot())) > 10


def test_hostile_names_values_and_logs_run_no_script(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "brisk-otter-3")
    record = json.loads(run.record.read_text())
    write_json(run.record, record | {"name": HOSTILE, "variant": HOSTILE, "job_id": HOSTILE})
    gang = json.loads(run.plan.read_text())["gang"]
    write_json(run.plan, {"run": run.name, "gang": gang, "spec": {HOSTILE: HOSTILE, "train": {"lr": HOSTILE}}})
    write_json(run.environment, {"packages": {HOSTILE: HOSTILE}, "host": HOSTILE, "git": {"branch": HOSTILE}})
    append_jsonl(run.events, {"time": 1e9, "event": HOSTILE, HOSTILE: HOSTILE})
    for step in range(3):
        append_jsonl(run.metrics, {"kind": "log", "step": step, HOSTILE: step, "time": 1e9})
        append_jsonl(run.metrics, {"kind": HOSTILE, "step": step, "loss": step, "time": 1e9})
    attempt = start_attempt(run)
    attempt.stderr(1).write_text(f"{HOSTILE}\n")
    fail(attempt)
    attempt.stderr(1).write_text(f"Traceback (most recent call last):\n{HOSTILE}\n")
    other = make_run(tmp_path / "runs", "calm-heron-4")
    complete(other, start_attempt(other))
    for names in (["brisk-otter-3"], ["brisk-otter-3", "calm-heron-4"]):
        page.open(report(tmp_path, *names))
        page.evaluate("new Promise(done => setTimeout(done, 300))")
        assert page.complaints() == []
        assert page.requests() == []
        assert page.evaluate("document.querySelectorAll('img, script:not(body > script)').length") == 0
        assert "<img src=x onerror=alert(1)>" in page.evaluate("document.body.innerText")


@pytest.fixture
def dash(tmp_path: Path, two_runs: list[RunDir]) -> Iterator[DashServer]:
    with dashboard(tmp_path / "runs") as server:
        yield server


def address(dash: DashServer, path: str = "/") -> str:
    return f"http://127.0.0.1:{dash.server_address[1]}{path}"


def shows(page: Page, words: str) -> bool:
    return words in str(page.evaluate("document.body?.innerText"))  # between two pages there is none


def test_the_dashboard_compares_by_clicks_and_shows_what_is_new(page: Page, dash: DashServer, tmp_path: Path) -> None:
    page.open(address(dash, f"/#{dash.key}"))
    assert page.evaluate("location.href") == address(dash)
    wait_until(lambda: shows(page, "brisk-otter-3"))
    new = make_run(tmp_path / "runs", "new-fox-9")
    wait_until(lambda: shows(page, "new-fox-9"))
    for name in ("brisk-otter-3", "calm-heron-4"):
        page.click(f"input[value='{name}']")
    page.click("button")
    wait_until(lambda: "/compare?run=" in str(page.evaluate("location.href")))
    wait_until(lambda: shows(page, "What differs") or shows(page, "Results"))
    assert page.complaints() == []
    assert all(url.startswith(address(dash)) for url in page.requests())
    write_json(new.record, json.loads(new.record.read_text()) | {"name": HOSTILE, "variant": HOSTILE})
    page.open(address(dash))
    wait_until(lambda: shows(page, "<img src=x onerror=alert(1)>"))
    assert page.complaints() == []


def test_the_dashboard_follows_a_log(page: Page, dash: DashServer, tmp_path: Path) -> None:
    attempt = start_attempt(make_run(tmp_path / "runs", "new-fox-9"))
    attempt.stdout(1).write_text("first line\n")
    page.open(address(dash, f"/#{dash.key}"))
    page.open(address(dash, "/log?run=new-fox-9&rank=1"))
    wait_until(lambda: shows(page, "first line"))
    with open(attempt.stdout(1), "a") as file:
        file.write(f"{HOSTILE}\n")
    wait_until(lambda: shows(page, "<img src=x onerror=alert(1)>"))
    assert page.complaints() == []
    assert page.evaluate("document.querySelectorAll('img').length") == 0


def test_links_reload_and_the_way_back_need_no_new_key(page: Page, dash: DashServer) -> None:
    page.open(address(dash, f"/#{dash.key}"))
    wait_until(lambda: shows(page, "calm-heron-4"))
    page.click("a[href='/run?run=brisk-otter-3']")
    wait_until(lambda: shows(page, "Made of") and not shows(page, "calm-heron-4"))
    assert page.evaluate("document.title") == "brisk-otter-3 - clusterddp"
    page.ask("Page.reload")
    wait_until(lambda: shows(page, "Made of"))
    page.evaluate("history.back()")
    wait_until(lambda: shows(page, "calm-heron-4"))
    assert dash.key not in str(page.evaluate("document.documentElement.outerHTML + location.href + document.cookie"))
    assert page.complaints() == []


def test_a_tab_without_the_key_says_where_it_is(page: Page, dash: DashServer) -> None:
    page.open(address(dash))
    wait_until(lambda: shows(page, "open the address that clusterddp dash has printed, in this tab"))
    assert not shows(page, "brisk-otter-3")
    page.evaluate(f"location.hash = {dash.key!r}")  # the printed address, in the same tab
    wait_until(lambda: shows(page, "brisk-otter-3"))
    page.evaluate("location.hash = 'of-an-earlier-dashboard'")
    wait_until(lambda: shows(page, "another key"))


def test_a_server_at_another_port_is_sent_no_key(page: Page, dash: DashServer) -> None:
    page.open(address(dash, f"/#{dash.key}"))
    wait_until(lambda: shows(page, "brisk-otter-3"))
    heard: list[str] = []

    class Neighbour(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(f"{self.path}\n{self.headers}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<body>of another user")

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Neighbour) as neighbour:
        threading.Thread(target=neighbour.serve_forever, daemon=True).start()
        page.open(f"http://127.0.0.1:{neighbour.server_address[1]}/")
        assert shows(page, "of another user")
        kept = page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
        neighbour.shutdown()
    assert heard
    assert dash.key not in "".join(heard) + str(kept)
