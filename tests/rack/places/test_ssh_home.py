"""Downloads from hosts over real connections, while cables are pulled, hosts are off, and people look."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.places.ssh.host_run import read_reports
from clusterddp.run.directory import RunDir
from tests.support.ssh_place import SshPlace, send, ssh_place_on
from tests.support.ssh_traces import command_of
from tests.support.waiting import wait_until
from tests.testbed.plan import RackPlan
from tests.testbed.rack import running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """
name: lan
launcher: ssh
device: cpu
resources: {procs_per_node: 2}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
"""
SLEEP = SPEC + "entry: {script: sleep.py}\n"
NUM_LINES, NUM_MANY = 60, 400
COUNT = SPEC + f"entry: {{script: count.py, args: ['{NUM_LINES}']}}\n"
COUNT_LONG = SPEC + f"entry: {{script: count.py, args: ['{NUM_MANY}']}}\n"
"""For eight seconds, in which something can happen."""
CUT = """\
add table inet laptop
add chain inet laptop input { type filter hook input priority 0; }
add rule inet laptop input ip saddr 10.77.0.0/24 drop
"""
"""What takes the laptop off the network; the hosts go on to reach each other."""


@pytest.fixture
def place(ssh_place: SshPlace) -> SshPlace:
    return furnished(ssh_place)


@pytest.fixture
def own_place(needs_rack: None) -> Iterator[SshPlace]:
    """A place on a rack of its own, for tests that break hosts."""
    plan = RackPlan(nodes=["node1", "node2"], private_hosts=True, slurm=False)
    with running_rack(plan) as rack, ssh_place_on(rack) as place:
        yield furnished(place)


def furnished(place: SshPlace) -> SshPlace:
    (place.path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    (place.path / "count.py").write_text(
        "import os, sys, time\nfor i in range(int(sys.argv[1])):\n    print(os.environ['RANK'], i, flush=True)\n"
        "    time.sleep(0.02)\n"
    )
    return place


def await_started(place: SshPlace, run: RunDir) -> None:
    wait_until(place.host_run_dir("node1", run).attempt(0).start.exists, 40)


def await_over(place: SshPlace, run: RunDir) -> None:
    wait_until(place.host_run_dir("node1", run).attempt(0).end.exists, 60)


def status(place: SshPlace, run: RunDir) -> dict[str, Any]:
    return place.status(run)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def counted(rank: int, num_lines: int = NUM_LINES) -> str:
    return "".join(f"{rank} {number}\n" for number in range(num_lines))


def test_a_command_that_waits_has_the_results_at_the_end(place: SshPlace) -> None:
    (place.path / "job.yaml").write_text(
        SPEC + "train: {dataset: shapes, samples: 256, model: fastnet, width: 0.125, epochs: 1, batch_size: 32}\n"
    )
    place.clusterddp("submit", "job.yaml", "--wait")
    run = place.run_dir()
    there = place.host_run_dir("node1", run)
    for path in [*there.checkpoints.iterdir(), there.metrics, there.summary, there.attempt(0).stderr(0)]:
        assert (run.path / path.relative_to(there.path)).read_bytes() == path.read_bytes()
    assert "3 COMPLETED" in " ".join(f"{rank['rank']} {rank['state']}" for rank in status(place, run)["ranks"])


def test_following_is_the_log_byte_for_byte(place: SshPlace) -> None:
    run = place.submit(COUNT)
    done = place.clusterddp("logs", "-f", "--rank", "2", run.name)
    assert done.stdout == counted(2)


def test_connections_that_break_while_a_user_follows_lose_no_byte_and_double_none(own_place: SshPlace) -> None:
    run = own_place.submit(COUNT_LONG)
    process = own_place.start("logs", "-f", "--rank", "0", run.name)
    wait_until(lambda: size_of(run.attempt(0).stdout(0)) > 0, 40)
    for _ in range(2):
        kill_sessions(own_place, "node1")
        size = size_of(run.attempt(0).stdout(0))
        wait_until(lambda size=size: size_of(run.attempt(0).stdout(0)) > size, 30)
    out, _ = process.communicate(timeout=240)
    assert out == counted(0, NUM_MANY)


def test_a_laptop_without_network_for_a_while_says_so_once_and_misses_nothing(own_place: SshPlace) -> None:
    run = own_place.submit(COUNT_LONG)
    process = own_place.start("logs", "-f", "--rank", "0", run.name)
    wait_until(lambda: size_of(run.attempt(0).stdout(0)) > 0, 40)
    own_place.rack.run("head", ["nft", "-f", "-"], stdin=CUT)
    wait_until(lambda: all(report.error for report in read_reports(run).values()), 60)
    own_place.rack.run("head", ["nft", "delete", "table", "inet", "laptop"])
    out, said = process.communicate(timeout=240)
    assert out == counted(0, NUM_MANY)
    for node in ("node1", "node2"):
        assert [said.count(f"{node} {words}") for words in ("cannot be reached", "answers again")] == [1, 1]


def test_ctrl_c_ends_the_watching_and_not_the_run(place: SshPlace) -> None:
    run = place.submit(SLEEP)
    await_started(place, run)
    began = time.time()
    process = place.start("wait", run.name)
    wait_until(lambda: any(report.asked > began for report in read_reports(run).values()), 30)
    time.sleep(3)  # until it has imported all: Python kills itself by SIGINT if one came while it made a dataclass
    send(process, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, "detached; the run goes on" in said) == (130, True)
    assert status(place, run)["state"] == "RUNNING"
    place.clusterddp("cancel", run.name)


def test_status_names_a_host_that_is_off_and_shows_the_others(own_place: SshPlace) -> None:
    run = own_place.submit(SLEEP)
    await_started(own_place, run)
    assert status(own_place, run)["state"] == "RUNNING"
    own_place.rack.power_off("node1")
    text = own_place.clusterddp("status", run.name).stdout
    # On a slow machine node2 has reported before we could ask.
    assert "node1 cannot be reached (" in text or "node 0 on node1 is lost" in text
    ranks = {rank["rank"]: rank["state"] for rank in own_place.await_state("FAILED", run=run)["ranks"]}
    assert ranks[2] == "KILLED"


def test_what_could_not_be_fetched_is_named_and_fetched_later(own_place: SshPlace) -> None:
    run = own_place.submit(COUNT)
    await_over(own_place, run)
    own_place.rack.power_off("node2")
    done = own_place.clusterddp("wait", run.name, check=False)
    assert done.returncode == 1
    assert "COMPLETED" in done.stderr
    assert "note: not all that the spec wants here has been fetched; node2 cannot be reached (" in done.stderr
    own_place.rack.power_on("node2")
    own_place.clusterddp("status", run.name)
    assert run.attempt(0).stdout(3).read_text() == counted(3)


def test_all_hosts_are_off_and_what_was_known_last_is_shown(own_place: SshPlace) -> None:
    run = own_place.submit(SLEEP)
    await_started(own_place, run)
    status(own_place, run)
    for node in ("node1", "node2"):
        own_place.rack.power_off(node)
    done = own_place.clusterddp("status", run.name, check=False)
    assert done.returncode == 0
    assert "last known: RUNNING" in done.stdout


def test_the_exit_code_reports_that_nothing_is_known_and_no_host_answers(own_place: SshPlace) -> None:
    run = own_place.submit(SLEEP)
    await_started(own_place, run)
    for node in ("node1", "node2"):
        own_place.rack.power_off(node)
    commands = (["status"], ["wait", "--timeout", "1"], ["logs"])
    assert [own_place.clusterddp(*words, run.name, check=False).returncode for words in commands] == [3, 3, 3]


def test_resume_waits_for_a_host_that_is_busy(own_place: SshPlace) -> None:
    """Once, Python takes longer to start there than a look waits; no command has seen the end of the run before."""
    (own_place.path / "fail.py").write_text("raise SystemExit(3)\n")
    slow = '#!/bin/sh\nif rm /srv/slow 2>/dev/null; then sleep 14; fi\nexec /opt/bare/bin/python "$@"\n'
    for node in ("node1", "node2"):
        python = own_place.rack.outside(node, "/srv/python")
        python.write_text(slow)
        python.chmod(0o755)
    run = own_place.submit(SPEC.replace("/opt/bare/bin/python", "/srv/python") + "entry: {script: fail.py}\n")
    wait_until(own_place.host_run_dir("node1", run).attempt(0).end.exists, 60)
    own_place.rack.outside("node1", "/srv/slow").touch()
    done = own_place.clusterddp("resume", run.name, check=False)
    assert done.returncode == 0, done.stderr


def test_hosts_that_were_off_and_are_on_again_have_lost_the_run(own_place: SshPlace) -> None:
    run = own_place.submit(SLEEP)
    await_started(own_place, run)
    status(own_place, run)
    for node in ("node1", "node2"):
        own_place.rack.power_off(node)
    own_place.rack.power_on("node1", "node2")
    assert own_place.await_state("LOST", "FAILED", run=run)["state"] == "LOST"


def test_the_record_is_enough_elsewhere(place: SshPlace) -> None:
    run = place.submit(COUNT)
    elsewhere = place.path / "elsewhere"
    shutil.copytree(run.path, elsewhere / run.name, symlinks=True)
    shutil.rmtree(run.path / "launcher")
    done = place.clusterddp("wait", "--runs", "elsewhere", run.name)
    assert "COMPLETED" in done.stderr
    assert (elsewhere / run.name / "attempts/0/logs/rank-003.out").read_text() == counted(3)


def test_logs_that_are_left_on_the_hosts_are_read_there(place: SshPlace) -> None:
    text = COUNT.replace("node2]}", "node2], fetch: none}")
    run = place.submit(text)
    place.clusterddp("wait", run.name)
    assert not run.attempt(0).stdout(1).exists()
    assert place.clusterddp("logs", "--rank", "1", run.name).stdout == counted(1)


def test_people_who_look_at_once_see_the_same(place: SshPlace) -> None:
    run = place.submit(COUNT)
    lookers = [place.start("logs", "-f", "--rank", "0", run.name) for _ in range(2)]
    lookers += [place.start("status", "-w", "-o", "json", run.name), place.start("wait", run.name)]
    outs = [looker.communicate(timeout=240)[0] for looker in lookers]
    assert outs[0] == outs[1] == counted(0)
    assert run.attempt(0).stdout(0).read_text() == counted(0)


def test_list_asks_each_host_once(place: SshPlace) -> None:
    runs = [place.submit(SLEEP) for _ in range(2)]
    text = place.clusterddp("list").stdout
    assert [line.split()[0] for line in text.splitlines()[1:]] == [run.name for run in reversed(runs)]
    assert text.count("RUNNING") + text.count("PENDING") == 2
    for run in runs:
        place.clusterddp("cancel", run.name)


def test_python_reads_a_run_on_hosts(place: SshPlace) -> None:
    run = place.submit(COUNT)
    await_over(place, run)
    program = (
        "import clusterddp; run = clusterddp.Run.find('@last'); print(run.wait(), len(run.logs(3)), len(run.status()))"
    )
    done = place.rack.run("head", [*python(place), "-c", program], cwd=place.path, env=place.variables())
    assert done.stdout.split()[:2] == ["COMPLETED", str(len(counted(3)))]


def python(place: SshPlace) -> list[str]:
    return place.command()[:1]


def kill_sessions(place: SshPlace, node: str) -> None:
    """End the connections to a node, as a network that resets them does."""
    for pid in place.rack.pids(node):
        if b"sshd: root" in command_of(pid):
            subprocess.run(["kill", "-9", str(pid)], check=False)
