"""One turn of the trainer: a submitted run, on this machine or on hosts of a rack, and the rows that it wrote."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_rounds import ROOT, Turn, UnavailableError

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_json, read_jsonl
from tests.support.ssh_place import SshPlace
from tests.testbed.rack import RackError

TURN_LIMIT_S = 900
_FACTS = ("precision", "comm", "exact", "loss", "accuracy", "accuracy_tta", "accuracy_ema")
_TIMES = ("train_seconds", "start_up_seconds", "compile_seconds", "time_to_accuracy")
_FIGURES = ("comm_bytes_per_step", "comm_exposed_percent", "data_wait_percent")


@dataclass(frozen=True, kw_only=True)
class LocalPlace:
    """A directory of this machine from which runs are submitted."""

    path: Path
    python: str = sys.executable

    def turn(
        self,
        *,
        ranks: int,
        threads: int,
        nodes: int = 1,
        warm_steps: int = 0,
        last_steps: int = 0,
        stop_after: int | None = None,
        device: str = "cpu",
        **train: Any,
    ) -> Turn:
        """Submit a run of `ranks` ranks on each of `nodes`, all this machine; wait for its end, read it, and remove it.

        Neither the first `warm_steps` nor the `last_steps` are timed. `stop_after`: it is cancelled after so many
        steps, for a short run does not time its kernels.
        """
        gpus = {"gpus_per_node": ranks} if device == "gpu" else {}
        spec = {
            "name": "bench",
            "launcher": "local",
            "device": device,
            "resources": {"nodes": nodes, "procs_per_node": ranks, "cpus_per_task": threads, **gpus},
            "train": train,
        }
        job = self.path / "job.yaml"
        job.write_text(json.dumps(spec))  # JSON is YAML
        comm = train.get("comm", "exact")
        if stop_after is None:
            return self.job_turn(job, warm_steps=warm_steps, last_steps=last_steps, comm=comm)
        global_batch = ranks * nodes * train["batch_size"]
        return self._stopped_turn(job, stop_after, warm_steps=warm_steps, last_steps=last_steps, batch=global_batch)

    def _stopped_turn(self, job: Path, stop_after: int, *, warm_steps: int, last_steps: int, batch: int) -> Turn:
        submitted = self._clusterddp("submit", str(job), "-o", "json")
        if submitted.returncode:
            raise UnavailableError(f"submit: {last_line(submitted.stderr)}")
        run = RunDir(Path(json.loads(submitted.stdout)["run_dir"]))
        try:
            deadline = time.monotonic() + TURN_LIMIT_S
            while not (rows := train_rows(run)) or rows[-1]["step"] < stop_after:
                time.sleep(0.5)  # a command that looked would take a core from the ranks
                if time.monotonic() > deadline or run.attempt(0).end.exists():
                    raise UnavailableError(f"the run came to no {stop_after} steps")
            facts = {key: rows[-1][key] for key in _FACTS if rows[-1].get(key) is not None}
            rows = [row for row in rows if row["step"] <= stop_after]
            return turn_of(rows, facts, warm_steps=warm_steps, last_steps=last_steps, global_batch=batch)
        finally:
            self._clusterddp("cancel", run.name)
            shutil.rmtree(run.path, ignore_errors=True)

    def job_turn(
        self, job: Path, *overrides: str, warm_steps: int = 0, last_steps: int = 0, comm: str = "exact"
    ) -> Turn:
        """Submit a spec, wait for the end of the run, read it, and remove it.

        Raises: UnavailableError: this trainer cannot do it, or the run failed.
        """
        submitted = self._clusterddp("submit", str(job), *overrides, "-o", "json")
        if submitted.returncode:
            raise UnavailableError(f"submit: {last_line(submitted.stderr)}")
        run = RunDir(Path(json.loads(submitted.stdout)["run_dir"]))
        try:
            ended = self._clusterddp("wait", run.name, "--timeout", str(TURN_LIMIT_S))
            if ended.returncode:
                raise UnavailableError(f"the run ended with {ended.returncode}: {last_line(ended.stderr)}")
            return read_turn(run, warm_steps=warm_steps, last_steps=last_steps, comm=comm)
        finally:
            self._clusterddp("cancel", run.name)  # of a run that has ended: nothing happens
            shutil.rmtree(run.path, ignore_errors=True)

    def _clusterddp(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", "clusterddp", *arguments]
        environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.path)}
        return subprocess.run(command, cwd=self.path, env=environ, text=True, capture_output=True, check=False)


def rack_turn(place: SshPlace, *, hosts: int, warm_steps: int, last_steps: int = 0, **train: Any) -> Turn:
    """Submit a run of one rank on each of the rack's first `hosts` nodes, a thread each; read it, and remove it.

    Neither the first `warm_steps` nor the `last_steps` are timed.
    """
    spec = {
        "name": "bench",
        "launcher": "ssh",
        "device": "cpu",
        "resources": {"procs_per_node": 1, "cpus_per_task": 1},
        "ssh": {"hosts": list(place.rack.plan.nodes)[:hosts], "python": "/opt/bare/bin/python"},
        "train": train,
    }
    try:
        return _rack_run(place, spec, warm_steps, last_steps)
    except RackError as error:
        raise UnavailableError(last_line(str(error))) from error


def _rack_run(place: SshPlace, spec: dict[str, Any], warm_steps: int, last_steps: int) -> Turn:
    run = place.submit(json.dumps(spec))
    there = place.host_run_dir("node1", run)
    try:
        _await_end(place, run, there)
        if not there.summary.exists():
            log = there.attempt(0).stdout(0).with_suffix(".err")
            raise UnavailableError(f"the run failed: {last_line(log.read_text() if log.exists() else '')}")
        comm = spec["train"].get("comm", "exact")
        return read_turn(there, warm_steps=warm_steps, last_steps=last_steps, comm=comm)
    finally:
        place.clusterddp("cancel", run.name, check=False)
        place.await_gone(place.record(run).token, within_s=120)
        for node in place.rack.plan.nodes:
            shutil.rmtree(place.host_run_dir(node, run).path, ignore_errors=True)
        shutil.rmtree(run.path)


def _await_end(place: SshPlace, run: RunDir, there: RunDir) -> None:
    """Look seldom: on a small machine looking takes time from the ranks.

    Raises: UnavailableError: it does not end.
    """
    deadline = time.monotonic() + TURN_LIMIT_S
    while not there.summary.exists() and place.all_processes(place.record(run).token):
        if time.monotonic() > deadline:
            raise UnavailableError(f"the run has not ended after {TURN_LIMIT_S} s")
        time.sleep(1)


def read_turn(run: RunDir, *, warm_steps: int, comm: str, last_steps: int = 0) -> Turn:
    """Read the rows of metrics.jsonl between the first and the last steps, and the summary.

    Raises: UnavailableError: the trainer did another exchange than was asked for, or came to no end.
    """
    summary = read_json(run.summary)
    if summary is None:
        raise UnavailableError("the run has no summary")
    done = summary.get("comm", "exact")
    if comm != done:
        raise UnavailableError(f"comm {comm} was asked for, and this trainer did {done}")
    facts = {key: summary[key] for key in _FACTS + _TIMES if summary.get(key) is not None}
    global_batch = summary["samples"] // summary["steps"]
    return turn_of(train_rows(run), facts, warm_steps=warm_steps, last_steps=last_steps, global_batch=global_batch)


def train_rows(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run.metrics) if row["kind"] == "train"]


def turn_of(
    rows: list[dict[str, Any]], facts: dict[str, Any], *, warm_steps: int, last_steps: int, global_batch: int
) -> Turn:
    """Read the turn of a run whose summary has `facts` from its rows, between the first and the last steps."""
    timed = [row for row in rows if warm_steps < row["step"] <= rows[-1]["step"] - last_steps]
    steps = timed[-1]["step"] - warm_steps
    seconds, before = 0.0, warm_steps
    for row in timed:
        seconds += (row["step"] - before) * global_batch / row["images_per_s"]
        before = row["step"]
    for key in _FIGURES:
        values = [row[key] for row in timed if row.get(key) is not None]
        facts |= {key: statistics.fmean(values)} if values else {}
    facts["train_loss"] = mean_of_last(rows, share=0.2)
    return Turn(images_per_s=steps * global_batch / seconds, step_ms=1e3 * seconds / steps, steps=steps, facts=facts)


def read_curve(run: Path) -> tuple[str, dict[str, Any]]:
    """Read the accuracy of each epoch of a run that came to its end, and what it cost; the name is its spec's."""
    directory = RunDir(run)
    summary, plan = read_json(directory.summary), read_json(directory.plan)
    if summary is None or plan is None:
        raise UnavailableError(f"{run}: no summary, or no plan")
    rows = read_jsonl(directory.metrics)
    epochs = [
        {"minutes": row["train_seconds"] / 60} | {key: row[key] for key in ("epoch", "accuracy", "loss")}
        for row in rows
        if row["kind"] == "eval"
    ]
    return plan["spec"]["name"], {"epochs": epochs, "summary": summary, "spec": plan["spec"]}


def mean_of_last(rows: list[dict[str, Any]], *, share: float) -> float:
    """Average the training loss over the last `share` of all steps."""
    begin = rows[-1]["step"] * (1 - share)
    return statistics.fmean(row["loss"] for row in rows if row["step"] > begin)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(no word)"
