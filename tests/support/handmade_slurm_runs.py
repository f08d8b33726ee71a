"""Runs on Slurm made by hand: the files that a submit, the batch script and the supervisors would have written."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.job_tag import job_name, job_tag
from clusterddp.run.record import ProcessIdentity, RunRecord, write_run
from clusterddp.run.seal import sealed
from clusterddp.system.files import write_json
from tests.support.handmade_runs import make_gang


def make_slurm_run(
    runs_dir: Path, name: str = "brisk-otter-3", *, job_id: str | None = None, attempt: int = 0, **changes: Any
) -> RunDir:
    """Make a run whose job was submitted, by a process that is gone; no rank of it was ever started."""
    run = RunDir(runs_dir / name)
    run.path.mkdir(parents=True)
    run.checkpoints.mkdir()
    run.launcher_dir.mkdir()
    run.attempt(attempt).path.mkdir(parents=True)
    write_json(run.plan, sealed({"run": name, "gang": placeholder_gang(), "spec": {}}))
    plain = RunRecord(
        run=name,
        token=f"t0ken-of-{name}",
        name="test",
        launcher="slurm",
        created_ns=time.time_ns(),
        job_id=job_id,
        submitter=dataclasses.asdict(dataclasses.replace(ProcessIdentity.of(), started=-5.0)),
        job_tag=job_tag(f"t0ken-of-{name}", attempt),
        job_attempt=attempt,
        base_attempt=attempt,
    )
    write_run(run, dataclasses.replace(plain, **changes))
    return run


def placeholder_gang() -> dict[str, Any]:
    gang = make_gang(nodes=2, per_node=1)
    nodes = tuple(dataclasses.replace(node, host=f"(node {node.node_rank} of the job)") for node in gang.nodes)
    return dataclasses.replace(gang, nodes=nodes, master_addr="").to_json()


def name_of_job(run: RunDir) -> str:
    return job_name("test", str(json.loads(run.record.read_text())["job_tag"]))


def update_record(run: RunDir, **changes: Any) -> None:
    write_json(run.record, json.loads(run.record.read_text()) | changes)


def begin_attempt(run: RunDir, number: int = 0, *, hosts: tuple[str, ...] = ("node1", "node2")) -> AttemptDir:
    """Write what the batch script and the head write when the ranks start."""
    attempt = run.attempt(number)
    attempt.ranks.mkdir(parents=True, exist_ok=True)
    attempt.logs.mkdir(exist_ok=True)
    write_json(attempt.claim, {"job_id": "1", "restart_count": number, "host": hosts[0], "time": time.time()})
    nodes = [
        {"node_rank": rank, "host": host, "ranks": [rank], "interface": "eth0", "address": f"10.77.0.{11 + rank}"}
        for rank, host in enumerate(hosts)
    ]
    head = ProcessIdentity(host=hosts[0], boot="elsewhere", pid=4120, started=1.0)
    facts = {"master_addr": "10.77.0.11", "master_port": 12345, "backend": "gloo", "nodes": nodes}
    write_json(attempt.start, {"attempt": number, "supervisor": dataclasses.asdict(head), **facts})
    return attempt


def end_attempt(attempt: AttemptDir, outcome: str = "COMPLETED", *, will_restart: bool = False) -> None:
    end = AttemptEnd(outcome=outcome, reason="the reason", will_restart=will_restart, needs_job=will_restart)  # type: ignore[arg-type]
    write_end(attempt, end)


def age(run: RunDir, seconds: float = 3600.0) -> None:
    """Make every file of a run so old as if it had not changed since."""
    moment = time.time() - seconds
    for path in [run.path, *run.path.rglob("*")]:
        os.utime(path, (moment, moment))
