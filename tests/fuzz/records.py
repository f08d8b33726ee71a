"""What the fuzzer mutates on disk: the files of a runs directory, notes of login nodes, reports of a doctor's nodes."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run
from clusterddp.system.files import read_json, write_json
from tests.fuzz.hosts import value_of
from tests.fuzz.mutations import TOKEN, Example, Target, rows
from tests.support.handmade_runs import complete, fail, make_gang, make_run, start_attempt, train

COMMANDS_A_TERMINAL = re.compile(
    "[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e\u2028\ud800-\udfff]|\x1b(?!\\[[0-9]{1,2}m)"
)
"""What no command may print."""


def records(root: Path) -> Target:
    runs_dir = root / "work" / "runs"
    made = [maker(runs_dir) for maker in (_running, _failed, _on_hosts, _by_torchrun, _on_slurm)]
    made += list(_swept(runs_dir))
    files = [path for run in made for path in sorted(run.rglob("*")) if _is_record(path)]
    examples = [Example(value=_value_of(path), what=path) for path in files]

    def read(path: Path, data: bytes, rng: random.Random) -> None:
        before = path.read_bytes()
        path.write_bytes(data)
        name = next(part for part in path.relative_to(runs_dir).parts)
        if name == "sweep" and rng.random() < 0.5:
            name = "sweep.0"
        try:
            _command(rng.choice(_COMMANDS), name, runs_dir)
        finally:
            path.write_bytes(before)

    return Target(name="records", examples=examples, read=read)


_COMMANDS = (
    *("status {run} -a", "status {run} -o json", "list", "list -o json", "status {run}"),
    *("logs {run} --rank all", "logs {run} --rank failed", "wait {run} --timeout 0"),
)


def _command(line: str, run: str, runs_dir: Path) -> None:
    """Run a command as people do; nothing that it prints commands a terminal."""
    from clusterddp.cli.main import cli
    from clusterddp.cli.terminal import Terminal

    arguments = [*line.format(run=run).split(), "--runs", str(runs_dir)]
    streams, printed = (sys.stdout, sys.stderr), [io.BytesIO(), io.BytesIO()]
    sys.stdout, sys.stderr = (io.TextIOWrapper(each, errors="backslashreplace", write_through=True) for each in printed)
    try:
        with cli.make_context("clusterddp", arguments, obj=Terminal(os.environ)) as context:
            cli.invoke(context)
    finally:
        held = sys.stdout, sys.stderr  # noqa: F841  their buffers would be closed with them
        sys.stdout, sys.stderr = streams
        text = b"".join(each.getvalue() for each in printed[arguments[0] == "logs" :]).decode()
    found = COMMANDS_A_TERMINAL.search(text)
    if found:
        raise AssertionError(f"prints {text[max(0, found.start() - 40) : found.end() + 40]!r}")


def _is_record(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.suffix in {".json", ".jsonl", ".txt", ".out", ".err"}


def _value_of(path: Path) -> Any:
    import json

    if path.suffix == ".jsonl":
        return rows(*map(json.loads, path.read_text().splitlines()))
    return read_json(path) if path.suffix == ".json" else path.read_bytes()


def _running(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "running")
    start_attempt(run)
    log_event(run, "submitted", attempt=0)
    log_event(run, "first_step", attempt=0, phases={"import": 1.0, "rendezvous": 0.5, "data": 2.0, "first_step": 3.0})
    train(run, steps=50)
    return run.path


def _failed(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "failed")
    fail(start_attempt(run), will_restart=True)
    fail(start_attempt(run, 1))
    return run.path


def _on_hosts(runs_dir: Path) -> Path:
    """Make a run over SSH whose plan has no seal: its hosts are not asked."""
    from clusterddp.places.ssh.host_run import HostReport, start_of, write_reports
    from clusterddp.planning.ssh import SshNode, SshPlan

    run = make_run(runs_dir, "hosts")
    record = dataclasses.replace(read_run(run), launcher="ssh")
    write_run(run, record)
    hosts = ("gpu01", "gpu02")
    gang = make_gang(nodes=2, per_node=1)
    nodes = tuple(dataclasses.replace(node, host=host) for node, host in zip(gang.nodes, hosts, strict=True))
    ssh = SshPlan(hosts=tuple(SshNode(host=host, node_rank=n, gpus=0) for n, host in enumerate(hosts)), root="~/.x")
    write_json(run.plan, {"gang": dataclasses.replace(gang, nodes=nodes).to_json(), "ssh": ssh.to_json(), "spec": {}})
    end = {"outcome": "FAILED", "reason": "node 1 was lost", "ended": time.time(), "root_cause": None}
    known = {"asked": time.time(), "reached": time.time(), "alive": ("s1", "n1"), "boot": "b", "has_run": True}
    start = start_of(record)
    reports = [HostReport(host="gpu02", start=start, end=end, end_attempt=0, checkpoints=("step-1-a0",), **known)]
    run.launcher_dir.mkdir()
    write_reports(run, [HostReport(host="gpu01", start=start, asked=1.0, error="timed out"), *reports])
    start_attempt(run, per_node=1)
    return run.path


def _by_torchrun(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "torchrun")
    write_run(run, dataclasses.replace(read_run(run), launcher="none", job_id="torchrun"))
    attempt = start_attempt(run)
    complete(run, attempt)
    attempt.end.unlink()
    write_json(
        attempt.error_file(0),
        {"message": {"message": "x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"}}},
    )
    return run.path


def _on_slurm(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "slurm")
    write_run(run, dataclasses.replace(read_run(run), launcher="slurm", job_id="17", job_tag="0" * 20))
    return run.path


def _swept(runs_dir: Path) -> Iterator[Path]:
    from clusterddp.run.sweep import QueueRecord, SweepDir, SweepRecord, write_queue, write_sweep

    sweep = SweepDir(runs_dir / "sweep")
    for number in range(2):
        run = make_run(sweep.path, f"sweep.{number}")
        write_run(run, dataclasses.replace(read_run(run), queued=True, variant=f"lr={number}"))
        start_attempt(run).start.unlink()
    identity = dataclasses.asdict(ProcessIdentity.of())
    record = {"sweep": "sweep", "token": TOKEN, "name": "test", "launcher": "local", "created_ns": time.time_ns()}
    write_sweep(sweep, SweepRecord(**record, keys=("train.lr",), size=2, job_id="7", submitter=identity))
    write_queue(sweep, QueueRecord(process=ProcessIdentity.of(), waits_for="GPUs"))
    sweep.tasks.write_text("sweep.0\nsweep.1\n")
    yield sweep.path


def login_notes(root: Path) -> Target:
    from clusterddp.cli.login import SentRun, find_sent_run, list_sent_runs, write_sent_run

    runs_dir = root / "work" / "sent"
    make_run(runs_dir, "here")
    write_sent_run(runs_dir, SentRun(run="brisk-otter-3", profile="hpc", secrets=("A",), created_ns=1))
    path = runs_dir / ".login" / "brisk-otter-3.json"
    example = Example(value=read_json(path))

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        before = path.read_bytes()
        path.write_bytes(data)
        try:
            list_sent_runs(runs_dir)
            find_sent_run(runs_dir, rng.choice(("@last", "brisk", "here")))
        finally:
            path.write_bytes(before)

    return Target(name="notes of a login node", examples=[example], read=read)


def nodes_reports(root: Path) -> Target:
    from clusterddp.doctor.cluster import JobAnswer, _read_output, _read_reports, judge_nodes
    from clusterddp.facts.checks import Needs
    from clusterddp.facts.machine import Machine
    from clusterddp.wire import build

    machine = value_of(Machine)
    here = build(Machine, machine)
    way = {
        "name": "n1",
        "addresses": ["10.0.0.1"],
        "reached": "10.0.0.1",
        "source": "10.0.0.2",
        "interface": "eth0",
        "clock_offset_s": 0.0,
        "error": "",
    }
    report = {"node_rank": 0, "node": "n1", "machine": machine, "way": way, "done": True}
    folder = root / "work" / "doctor"
    folder.mkdir()

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        (folder / "node-0.json").write_bytes(data)
        (folder / "job.out").write_bytes(data)
        reports = {report["node"]: report for report in _read_reports(folder)}
        answer = JobAnswer(
            job_id="1",
            num_nodes=1,
            nodes=("n1", *reports),
            reports=reports,
            submitted=0.0,
            collected=1.0,
            output=_read_output(folder),
        )
        judge_nodes(answer, here, Needs())

    return Target(
        name="reports of a doctor's nodes",
        examples=[Example(value=report)],
        read=read,
    )
