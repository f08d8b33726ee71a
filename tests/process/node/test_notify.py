"""Messages of real runs: from the head, and from a later command where it could not; the report at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import read_run
from clusterddp.run.sweep import SweepDir
from clusterddp.system.files import read_jsonl
from tests.support.waiting import PATIENCE, wait_until
from tests.support.webhook import Webhook

FAILS = "entry: {command: [sh, -c, 'test $RANK = 0 || exit 3; sleep 60']}\n"
SLEEPS = "entry: {command: [sleep, '60']}\n"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for runs; what is started in it does not outlive the test."""
    yield tmp_path
    for record in [*tmp_path.glob("runs/*/run.json"), *tmp_path.glob("runs/*/*/run.json")]:
        end_processes(f"{read_run(RunDir(record.parent)).token}.", timeout_s=5)


def clusterddp(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", *arguments],
        cwd=place,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )


def submit(place: Path, entry: str, notify: str, *arguments: str, more: str = "", **environ: str) -> RunDir:
    spec = f"name: a\ndevice: cpu\nresources: {{procs_per_node: 2}}\n{entry}notify: {{{notify}}}\n{more}"
    (place / "job.yaml").write_text(spec)
    done = clusterddp(place, "submit", "job.yaml", *arguments, **environ)
    assert done.returncode in {0, 5}, done.stderr
    return list_runs(place / "runs")[-1]


def notified(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run.events) if row["event"].startswith("notif")]


def test_the_head_of_a_run_that_fails_sends_one_message_by_each_way(place: Path):
    said = "command: [sh, -c, 'echo $CLUSTERDDP_REASON >> said']"
    with Webhook() as webhook:
        run = submit(place, FAILS, f"on: [start, fail], webhook: '${{HOOK}}', {said}", "--wait", HOOK=webhook.url)
        assert [message["event"] for message in webhook.received] == ["start", "fail"]
        again = clusterddp(place, "wait", run.name, HOOK=webhook.url)
        assert again.returncode == 5
        assert len(webhook.received) == 2
    assert "rank 1" in webhook.received[1]["text"]
    assert (run.path / "said").read_text().splitlines()[-1] == webhook.received[1]["reason"]
    assert [row["by"] for row in notified(run)].count("webhook") == 2
    for path in run.path.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


def test_the_report_is_written_at_the_end_and_status_names_it(place: Path):
    run = submit(place, FAILS, "command: [true]", "--wait")
    wait_until(run.report.exists)
    assert run.report.stat().st_size <= 300_000
    status = json.loads(clusterddp(place, "status", run.name, "-o", "json").stdout)
    assert status["report"] == str(run.report)


def test_a_later_command_sends_what_the_head_could_not_once(place: Path):
    with Webhook() as free:
        port = free.server_address[1]
    url = f"http://127.0.0.1:{port}/hunter2"
    run = submit(place, FAILS, "webhook: '${HOOK}'", HOOK=url)
    wait_until(lambda: [row["event"] for row in notified(run)] == ["notify_failed"])
    assert "notify.webhook was not sent" in clusterddp(place, "status", run.name).stdout
    with Webhook(port=port) as webhook:
        for _ in range(2):
            clusterddp(place, "wait", run.name, HOOK=url)
        assert [message["state"] for message in webhook.received] == ["FAILED"]
    assert notified(run)[-1]["event"] == "notified"


def test_a_failed_try_is_repeated_once(place: Path):
    with Webhook(500) as webhook:
        run = submit(place, FAILS, "webhook: '${HOOK}'", HOOK=webhook.url)
        wait_until(lambda: [row["event"] for row in notified(run)] == ["notify_failed"])
        assert len(webhook.received) == 2


def test_a_command_that_hangs_holds_up_nothing(place: Path):
    run = submit(place, "entry: {command: ['true']}\n", "command: [sleep, '60']")
    wait_until(run.attempt(0).end.exists)
    done = clusterddp(place, "wait", run.name)
    assert done.returncode == 0
    assert "was killed after 12 s" in notified(run)[-1]["error"]


def test_a_sweep_sends_one_message_at_its_end(place: Path):
    sweep = "sweep: {values: {env.X: ['1', '2', '3']}}\n"
    with Webhook() as webhook:
        entry = "entry: {command: ['true']}\n"
        spec = f"name: a\ndevice: cpu\n{entry}notify: {{webhook: '${{HOOK}}'}}\n{sweep}"
        (place / "job.yaml").write_text(spec)
        done = clusterddp(place, "submit", "job.yaml", "--wait", "-o", "json", HOOK=webhook.url)
        assert done.returncode == 0, done.stderr
        name = json.loads(done.stdout.splitlines()[0])["sweep"]
        wait_until(lambda: bool(webhook.received))
        clusterddp(place, "status", name, HOOK=webhook.url)
        assert [message["text"] for message in webhook.received] == [f"{name} COMPLETED: 3 COMPLETED"]
    assert not any(run.report.exists() for run in SweepDir(place / "runs" / name).runs())
    assert find_run(place / "runs", f"{name}.0").path.exists()
