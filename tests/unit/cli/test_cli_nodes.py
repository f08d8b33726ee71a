"""The command nodes, and what a plan does with nodes that are marked."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.places.slurm.launcher import SlurmLauncher
from clusterddp.places.slurm.nodes import leave_out, notes_on_nodes
from clusterddp.planning.plan import Plan
from clusterddp.run.node_marks import Mark, read_marks, remember
from tests.support.launch_runs import plan_text

SLURM = (
    "name: job\nlauncher: slurm\ndevice: cpu\nresources: {{nodes: {nodes}{size}}}\nslurm: {{partition: gpu{more}}}\n"
)
WHY = "core 0 is slow"
ENTRY = "entry: {command: hostname}\n"


@pytest.fixture(autouse=True)
def own_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return what makes sinfo and scontrol print these lines; it returns the environment."""

    def make(*, sinfo: str = "", reservations: str = "") -> dict[str, str]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name, text in (("sinfo", sinfo), ("scontrol", reservations)):
            (tmp_path / "bin" / f"{name}.txt").write_text(text)
            script = tmp_path / "bin" / name
            script.write_text(f"#!/bin/sh\ncat {tmp_path}/bin/{name}.txt\n")
            script.chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}

    return make


def states(**nodes: str) -> str:
    rows = [(name, *words.partition(" ")[::2]) for name, words in nodes.items()]
    return "".join(f"{name}\x1f{state}\x1f{why or 'none'}\x1fgpu*\n" for name, state, why in rows)


def mark(
    node: str, *, launcher: str = "slurm", hours: float = 2, ago_s: float = 0, why: str = "core 0 is slow"
) -> None:
    since = time.time() - ago_s
    remember([Mark(node=node, launcher=launcher, why=why, run="r-12", since=since, until=since + hours * 3600)])


def slurm_plan(tmp_path: Path, environ: dict[str, str], *, nodes: int = 2, more: str = "", size: str = "") -> Plan:
    return plan_text(SLURM.format(nodes=nodes, more=more, size=size) + ENTRY, tmp_path, environ=environ)


def test_nodes_lists_filters_and_clears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs", str(tmp_path)]
    assert main(["nodes", *runs]) == 0
    assert "no node is left out" in capsys.readouterr().err
    mark("gpu03", why="node 1 on gpu03 is lost", hours=24)
    mark("gpu04", launcher="ssh")
    assert main(["nodes", *runs]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split() == ["NODE", "LAUNCHER", "WHY", "RUN", "SINCE", "UNTIL"]
    assert sorted(row.split()[0] for row in rows) == ["gpu03", "gpu04"]
    assert main(["nodes", "gpu03", "-o", "json", *runs]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(each["node"], each["why"], each["run"]) for each in shown["nodes"]] == [
        ("gpu03", "node 1 on gpu03 is lost", "r-12")
    ]
    assert main(["nodes", "gpu9", *runs]) == 2
    assert "gpu9: no run leaves it out" in capsys.readouterr().err
    assert main(["nodes", "--clear", "gpu03", *runs]) == 0
    assert capsys.readouterr().out.startswith("gpu03 is let in again\n")
    assert main(["nodes", "--clear", *runs]) == 0
    assert read_marks() == []


def test_a_marked_node_is_excluded_and_the_plan_says_so(tmp_path: Path, slurm) -> None:
    environ = slurm(sinfo=states(node1="idle", node2="alloc", node3="mix", node4="idle"))
    mark("node3")
    mark("node9")  # of another partition
    plan = SlurmLauncher(environ).look_ahead(slurm_plan(tmp_path, environ))
    assert "--exclude=node3" in plan.slurm.sbatch
    assert [note for note in plan.notes if note.startswith("node3 left out until ") and "(run r-12)" in note]
    assert "--exclude=node3" in plan.commands[0]


def test_the_user_s_own_exclude_and_nodelist_stay(tmp_path: Path, slurm) -> None:
    environ = slurm(sinfo=states(node1="idle", node2="idle", node3="idle", node4="idle"))
    mark("node3")
    plan = slurm_plan(tmp_path, environ, nodes=1, more=", exclude: node4")
    assert leave_out(plan.slurm, environ).submit_options["exclude"] == "node4,node3"
    plan = slurm_plan(tmp_path, environ, nodes=1, more=", nodelist: 'node[3-4]'")
    assert leave_out(plan.slurm, environ).left_out == {}


def test_no_more_is_left_out_than_the_partition_can_spare_and_failed_nodes_first(tmp_path: Path, slurm) -> None:
    environ = slurm(sinfo=states(node1="idle", node2="idle", node3="idle", node4="down* it is off"))
    mark("node1", ago_s=10)
    mark("node2", hours=24)
    assert list(leave_out(slurm_plan(tmp_path, environ, nodes=2).slurm, environ).left_out) == ["node2"]
    assert list(leave_out(slurm_plan(tmp_path, environ, nodes=1).slurm, environ).left_out) == ["node2", "node1"]
    assert leave_out(slurm_plan(tmp_path, environ, nodes=3).slurm, environ).left_out == {}


def test_without_slurm_nothing_is_left_out(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": str(tmp_path)}
    mark("node3")
    plan = slurm_plan(tmp_path, dict(os.environ))
    assert leave_out(plan.slurm, environ).left_out == {}
    assert notes_on_nodes(plan.slurm, environ) == ()


def test_nodes_of_the_nodelist_that_are_down_are_named(tmp_path: Path, slurm) -> None:
    environ = slurm(sinfo=states(node1="idle", node2="drain bad fan", node3="idle"))
    plan = slurm_plan(tmp_path, environ, more=", nodelist: 'node[1-2]'")
    assert notes_on_nodes(plan.slurm, environ) == ("slurm.nodelist: node2 is drain (bad fan): the job waits for it",)


@pytest.mark.parametrize(
    ("reservation", "time_limit", "notes"),
    [
        (("MAINT,SPEC_NODES", 3), "4:00:00", 1),
        (("MAINT", 5), "4:00:00", 0),
        (("MAINT", 5), "", 1),
        (("SPEC_NODES", 3), "4:00:00", 0),
        (("MAINT", -1), "4:00:00", 0),
    ],
)
def test_a_maintenance_that_begins_before_the_end_is_said(
    reservation: tuple[str, int], time_limit: str, notes: int, tmp_path: Path, slurm
) -> None:
    flags, hours = reservation
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + hours * 3600))
    line = f"ReservationName=upgrade StartTime={begin} EndTime={begin} Duration=1 Nodes=node[1-4] Flags={flags}\n"
    environ = slurm(reservations=line)
    size = f", time: '{time_limit}'" if time_limit else ""
    said = notes_on_nodes(slurm_plan(tmp_path, environ, size=size).slurm, environ)
    assert [note.startswith("maintenance of node[1-4] begins ") for note in said] == [True] * notes


@pytest.mark.parametrize(("text", "notes"), [("2880", 1), ("2-0", 1), ("60", 0), ("UNLIMITED", 1), ("nonsense", 1)])
def test_a_scripts_own_time_limit_may_have_any_of_slurms_forms(text: str, notes: int, tmp_path: Path, slurm) -> None:
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5 * 3600))
    line = f"ReservationName=upgrade StartTime={begin} EndTime={begin} Duration=1 Nodes=node1 Flags=MAINT\n"
    environ = slurm(reservations=line)
    plan = dataclasses.replace(slurm_plan(tmp_path, environ).slurm, script=f"#!/bin/bash\n#SBATCH --time={text}\n")
    assert len(notes_on_nodes(plan, environ)) == notes


def test_over_ssh_a_marked_host_is_taken_last(tmp_path: Path) -> None:
    spec = "name: job\nlauncher: ssh\ndevice: cpu\nsnapshot: false\nssh: {hosts: ['gpu[1-3]']}\n" + ENTRY
    mark("gpu1", launcher="ssh")
    plan = plan_text(spec + "resources: {nodes: 2}\n", tmp_path)
    assert [node.host for node in plan.gang.nodes] == [host.host for host in plan.ssh.hosts] == ["gpu2", "gpu3"]
    assert [note for note in plan.notes if note.startswith("gpu1 left out until ")]
    plan = plan_text(spec, tmp_path)
    assert [node.host for node in plan.gang.nodes] == ["gpu1", "gpu2", "gpu3"]
    needed = "gpu1 is needed all the same, as no other host is named in its place: core 0 is slow (run r-12)"
    assert needed in plan.notes
