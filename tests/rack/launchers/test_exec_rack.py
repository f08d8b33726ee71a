"""A command, and a shell, beside a rank on another machine: over SSH, and in the job of Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_place import SshPlace, send
from tests.support.ssh_traces import command_of
from tests.support.typist import typing_into
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

ENTRY = 'import os, time\nprint(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)\ntime.sleep(600)\n'
OVER_SSH = """name: job
launcher: ssh
device: cpu
resources: {procs_per_node: 2}
ssh: {hosts: [node1, node2], python: /opt/bare/bin/python}
env: {SHELL: /bin/sh}
entry: {script: entry.py}
"""
ON_SLURM = """name: job
launcher: slurm
resources: {nodes: 2, procs_per_node: 2, cpus_per_task: 1, time: "0:10:00"}
snapshot: false
env: {SHELL: /bin/sh}
entry: {script: entry.py}
"""
WHERE = 'read word; echo "$word $(uname -n) $CLUSTERDDP_EXEC_RANK ${RANK:-none}"; echo wrong >&2; exit 7'
Place = SshPlace | SlurmPerson


@pytest.fixture
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        yield rack


def start_run(place: Place, spec: str) -> RunDir:
    (place.path / "entry.py").write_text(ENTRY)
    run = place.submit(spec)
    wait_until(
        lambda: place.clusterddp("exec", run.name, "--rank", "all", "--", "true", check=False).returncode == 0, 60
    )
    return run


def shell_of(place: Place, run: RunDir, *words: str) -> list[str]:
    return place.rack.argv(
        HEAD, place.command("shell", run.name, *words), cwd=place.path, env={**place.variables(), "TERM": "vt100"}
    )


def check_commands(place: Place, run: RunDir) -> None:
    done = place.clusterddp("exec", run.name, "--rank", "3", "--", "sh", "-c", WHERE, stdin="typed\n", check=False)
    assert (done.stdout, done.returncode) == ("typed node2 3 none\n", 7)
    assert "wrong\n" in done.stderr
    command = ("sh", "-c", "uname -n; exit $CLUSTERDDP_EXEC_RANK")
    several = place.clusterddp("exec", run.name, "--rank", "all", "--", *command, check=False)
    lines = sorted(several.stdout.splitlines())
    assert lines == [f"[r{rank} node{1 + rank // 2}] node{1 + rank // 2}" for rank in range(4)]
    assert several.returncode == 3


def check_ctrl_c(place: Place, run: RunDir) -> None:
    """Press Ctrl-C where the command has no terminal of its own: it goes to the command, whose exit code counts."""
    program = "import time\nprint('up', flush=True)\ntry: time.sleep(600)\nexcept KeyboardInterrupt: exit(9)"
    waits = place.start("exec", run.name, "--rank", "3", "--", "python3", "-c", program)
    assert waits.stdout is not None
    assert waits.stdout.readline() == "up\n"
    send(waits)
    assert waits.wait(60) == 9


def check_shell(place: Place, run: RunDir) -> None:
    """Type into a shell: its terminal has the size of this one, Ctrl-C goes to its program, and modes are restored."""
    with typing_into(shell_of(place, run, "--node", "1")) as person:
        modes = person.modes()
        person.type("echo on $(uname -n) $(stty size); sleep 600\n")
        person.await_text("on node2 30 100")
        person.type("\x03")
        person.resize(41, 77)
        person.process.send_signal(signal.SIGWINCH)
        person.type("while ! stty size | grep 41.77; do sleep 0.1; done; exit 5\n")
        person.await_text("41 77\r\n")
        assert person.await_exit() == 5
        assert person.modes() == modes
    assert place.status(run)["state"] == "RUNNING"


def cut_connections(place: SshPlace, node: str) -> None:
    """Kill the processes of sshd that serve connections."""
    for pid in place.rack.pids(node):
        if command_of(pid).startswith(b"sshd: root@"):
            os.kill(pid, signal.SIGKILL)


def test_over_ssh_a_command_runs_on_the_ranks_host_and_ends_with_the_connection(ssh_place: SshPlace) -> None:
    run = start_run(ssh_place, OVER_SSH)
    check_commands(ssh_place, run)
    check_ctrl_c(ssh_place, run)
    check_shell(ssh_place, run)

    def commands() -> list[str]:
        return [each.command for each in ssh_place.all_processes() if each.role.startswith("x")]

    left = ssh_place.start("exec", run.name, "--rank", "2", "--", "sleep", "600")
    wait_until(commands)
    os.killpg(left.pid, signal.SIGKILL)
    wait_until(lambda: not commands())
    with typing_into(shell_of(ssh_place, run)) as person:
        modes = person.modes()
        wait_until(commands)
        cut_connections(ssh_place, "node1")
        assert person.await_exit() == 3
        assert "node1: ask: the connection broke, which ends the command; the run goes on" in person.look()
        assert person.modes() == modes
    wait_until(lambda: not commands())
    with typing_into(shell_of(ssh_place, run)) as person:
        modes = person.modes()
        wait_until(commands)
        ssh_place.clusterddp("cancel", run.name)
        assert person.await_exit() == 129
        assert person.modes() == modes
    ssh_place.await_gone(ssh_place.record(run).token)


def test_on_slurm_a_command_runs_in_the_job_and_does_not_keep_it(rack: Rack) -> None:
    person = SlurmPerson.at(rack, "beside")
    run = start_run(person, ON_SLURM)
    check_commands(person, run)
    check_ctrl_c(person, run)
    printed = person.clusterddp(
        "exec", run.name, "--", "sh", "-c", "echo $SLURM_JOB_ID $SLURM_STEP_ID; pwd"
    ).stdout.split()
    job_id = person.record(run).job_id
    assert printed[0] == job_id
    assert printed[1:] != ["0", str(person.path)]
    assert Path(printed[2]) == person.path
    visible = person.clusterddp("exec", run.name, "--", "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-None}").stdout
    assert visible == run.attempt(0).stdout(0).read_text()
    check_shell(person, run)
    with typing_into(shell_of(person, run)) as typist:
        modes = typist.modes()
        wait_until(lambda: person.processes(run, ".x0"))
        person.clusterddp("cancel", run.name)
        assert typist.await_exit() != 0
        assert typist.modes() == modes
    wait_until(lambda: person.processes(run) == [])
    wait_until(lambda: person.job(str(job_id))["JobState"] == "CANCELLED", 60)
