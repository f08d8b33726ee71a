"""`report`, `compare` and `list --sort`, on runs made by hand."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from clusterddp.cli.login import SentRun, write_sent_run
from clusterddp.cli.main import main
from clusterddp.cli.page.drawing import Html, el
from clusterddp.cli.page.pages import MAX_BYTES
from clusterddp.run.directory import RunDir
from clusterddp.run.seal import sealed
from clusterddp.system.files import append_jsonl, read_json, write_json
from tests.support.handmade_runs import complete, fail, make_run, rank_record, start_attempt, train

HOSTILE = "</script></title><img src=x onerror=alert(1)>\"' onload=\x1b[31m\u202e"


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def command(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def trained(runs_dir: Path, name: str, steps: int = 100, **spec: object) -> RunDir:
    run = make_run(runs_dir, name)
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    write_json(run.plan, sealed(plan | {"spec": {"train": spec}}))
    train(run, steps=steps)
    complete(run, start_attempt(run))
    return run


class _Elements(HTMLParser):
    """The names of all elements of a page, and of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_report_of_one_run_lies_in_its_directory(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trained(runs_dir, "brisk-otter-3")
    code, out, err = command(capfd, "report")
    page = run.report.read_text()
    assert (code, out) == (0, "")
    assert str(run.report) in err
    assert "<title>brisk-otter-3 - clusterddp</title>" in page
    assert 'aria-labelledby="t0 d0"' in page


def test_the_report_of_several_runs_lies_here(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "brisk-otter-3", lr=0.1)
    trained(runs_dir, "calm-heron-4", lr=0.2)
    assert command(capfd, "report", "brisk-otter-3", "calm-heron-4")[0] == 0
    page = Path("report.html").read_text()
    assert "train.lr" in page
    assert page.count('data-name="calm-heron-4 train"') == 3  # loss, lr, images_per_s


def test_the_report_goes_to_standard_output(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "brisk-otter-3")
    code, out, _ = command(capfd, "report", "--out", "-")
    assert code == 0
    assert out.startswith("<!doctype html>")


def test_a_report_prints_where_it_lies_as_json(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trained(runs_dir, "brisk-otter-3")
    code, out, err = command(capfd, "report", "-o", "json")
    size = run.report.stat().st_size
    assert (code, err) == (0, "")
    assert json.loads(out) == {"schema": 1, "runs": [run.name], "path": str(run.report.resolve()), "bytes": size}
    code, out, err = command(capfd, "report", "--out", "-", "-o", "json")
    assert (code, out) == (2, "")
    assert "standard output" in err


def test_the_page_allows_its_own_style_and_script_only(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "brisk-otter-3")
    _, page, _ = command(capfd, "report", "--out", "-")
    sums = []
    for name in ("style", "script"):
        inside = re.findall(f"<{name}>(.*?)</{name}>", page, re.DOTALL)
        assert len(inside) == 1
        sums.append(base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode())
    policy = f"default-src 'none'; style-src 'sha256-{sums[0]}'; script-src 'sha256-{sums[1]}'"
    assert policy.replace("'", "&#x27;") in page
    assert "https:" not in page


def test_no_text_of_a_run_becomes_markup(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir, "brisk-otter-3")
    record = read_json(run.record)
    assert isinstance(record, dict)
    write_json(run.record, record | {"name": HOSTILE, "variant": HOSTILE, "job_id": HOSTILE})
    write_json(run.environment, {"packages": {HOSTILE: HOSTILE}, "host": HOSTILE})
    append_jsonl(run.metrics, {"kind": "log", "step": 1, HOSTILE: 1, "time": 1e9})
    attempt = start_attempt(run)
    fail(attempt)
    attempt.stderr(1).write_text(HOSTILE)
    _, page, _ = command(capfd, "report", "--out", "-")
    found = _Elements(page)
    assert "img" not in found.names
    assert not [name for name in found.attributes if name.startswith("on") or name == "style"]
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_numbers_and_times_of_any_size_are_drawn(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(runs_dir, "brisk-otter-3")
    numbers = [1e308, -1e308, 5e-324, 0.0, 1e-200, 2**62, 1 + 2**-52, 1, 1e149, -1e149]
    for step, number in enumerate(numbers):
        append_jsonl(run.metrics, {"kind": "train", "step": number, "loss": number, "only": number, f"k{step}": number})
        append_jsonl(run.events, {"event": "x", "time": number, "attempt": number})
    attempt = start_attempt(run)
    write_json(attempt.end, {"outcome": "FAILED", "reason": "x", "ended": 9e18})
    write_json(attempt.rank_record(0), dataclasses.asdict(rank_record(0)) | {"started": 9e18, "ended": -9e18})
    write_json(run.checkpoints / "step-1.json", {"created": 9e18, "step": 9e18, "bytes": -1})
    code, page, err = command(capfd, "report", "--out", "-")
    assert (code, err) == (0, "")
    assert ">nan" not in page
    assert "nan," not in page


def test_an_element_escapes_what_is_not_made_here() -> None:
    assert el("p", "<b>", el("i", 1), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i>1</i></p>'
    assert isinstance(el("p"), Html)


@pytest.mark.parametrize("num_runs", [1, 30])
def test_a_page_is_small_however_much_there_is(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], num_runs: int
) -> None:
    """100 keys, 700 packages, 300 keys of the spec, 400 events, long texts, each ten times as long when escaped."""
    event = json.dumps({"event": "<x>", "time": 1e9, "why": "<" * 999}) + "\n"
    rows = [{"kind": "log", "step": step} | {f"<key {key}>": step * key for key in range(100)} for step in range(100)]
    for number in range(num_runs):
        run = make_run(runs_dir, f"run-{number}")
        plan = read_json(run.plan)
        assert isinstance(plan, dict)
        write_json(run.plan, plan | {"spec": {f"key{key}": f"<{number}>" * 100 for key in range(300)}})
        write_json(run.environment, {"packages": {f"package{each}": f"{number}.{each}" for each in range(700)}})
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.events.write_text(event * 400)
        attempt = start_attempt(run)
        fail(attempt)
        attempt.stderr(1).write_text(("\x1b<" * 200 + "\n") * 100)
    _, page, _ = command(capfd, "report", "--out", "-", *(f"run-{number}" for number in range(num_runs)))
    assert len(page.encode()) <= MAX_BYTES
    assert "</html>" in page


def test_compare_shows_the_why_above_the_what(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "brisk-otter-3", lr=0.1, epochs=3)
    trained(runs_dir, "calm-heron-4", 60, lr=0.2, epochs=3)
    code, out, _ = command(capfd, "compare", "brisk-otter-3", "calm-heron-4")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == ["configuration  brisk-otter-3  calm-heron-4", "train.lr       0.1            0.2"]
    assert "best accuracy  60.00%         55.00%" in lines
    assert lines.index(lines[1]) < lines.index("best accuracy  60.00%         55.00%")


def test_many_runs_are_rows_that_fit_a_terminal(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from clusterddp.cli.text.compare import compare_lines
    from clusterddp.view.report import compare, read_reports

    runs = [trained(runs_dir, f"run-with-a-long-name-{number}", lr=0.1 * number) for number in range(9)]
    lines = compare_lines(compare(read_reports(runs, {})), columns=80)
    assert max(len(click.unstyle(line)) for line in lines) <= 80
    assert not [line for line in lines if line.endswith("...")]
    assert sum(line.startswith("run-with-a-long-name-") for line in lines) >= 18


def test_compare_prints_json_with_its_version(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "brisk-otter-3", lr=0.1)
    trained(runs_dir, "calm-heron-4", lr=0.2)
    _, out, _ = command(capfd, "compare", "brisk-otter-3", "calm-heron-4", "-o", "json")
    found = json.loads(out)
    assert found["schema"] == 1
    assert found["differences"]["spec"] == {"train.lr": {"brisk-otter-3": "0.1", "calm-heron-4": "0.2"}}
    assert [run["results"]["accuracy"] for run in found["runs"]] == [0.6, 0.6]


def test_runs_of_several_places_are_not_mixed(
    runs_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(runs_dir, "brisk-otter-3")
    (runs_dir.parent / "config.yaml").write_text("profiles:\n  hpc: {launcher: slurm, login: hpc}\n")
    monkeypatch.setenv("CLUSTERDDP_CONFIG", str(runs_dir.parent / "config.yaml"))
    there = SentRun(run="calm-heron-4", profile="hpc", secrets=(), created_ns=1)
    write_sent_run(runs_dir, there)
    for name in ("report", "compare"):
        code, _, err = command(capfd, name, "brisk-otter-3", "calm-heron-4")
        assert code == 2
        assert "these runs are in several places: here, on hpc" in err


def test_one_run_is_not_compared(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "brisk-otter-3")
    code, _, err = command(capfd, "compare", "brisk-otter-3")
    assert code == 2
    assert "two runs or more" in err


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("accuracy", ["good", "bad", "none"]),
        ("-accuracy", ["bad", "good", "none"]),
        ("created", ["none", "bad", "good"]),
        ("-created", ["good", "bad", "none"]),
        ("name", ["bad", "good", "none"]),
        ("-name", ["none", "good", "bad"]),
    ],
)
def test_list_sorts(runs_dir: Path, capfd: pytest.CaptureFixture[str], order: str, names: list[str]) -> None:
    trained(runs_dir, "good", 100)
    trained(runs_dir, "bad", 50)
    make_run(runs_dir, "none")
    _, out, _ = command(capfd, "list", "--sort", order, "-o", "json")
    assert [run["run"] for run in json.loads(out)] == names
    _, out, _ = command(capfd, "list", "--sort", order, "--limit", "1", "-o", "json")
    assert [run["run"] for run in json.loads(out)] == names[:1]
