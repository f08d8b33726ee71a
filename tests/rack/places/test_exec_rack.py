"""A command, and a shell, beside a rank on another machine: by ssh, and in the job of Slurm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_person import own_ssh_dir
from tests.support.ssh_place import SshPlace, ssh_place_on
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
ssh: {hosts: [node1, {host: node2, modules: []}]}
python: /opt/bare/bin/python
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
WHERE = 'read word; echo "$word $(uname -n) $CLUSTERDDP_EXEC_RANK ${RANK:-none} $0!"; echo wrong >&2; exit 7'
Place = SshPlace | SlurmPerson


@pytest.fixture
def rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        yield rack


def start_run(place: Place, spec: str) -> RunDir:
    (place.path / "entry.py").write_text(ENTRY)
    run = place.submit(spec)
    seen: list[str] = []

    def is_there() -> bool:
        done = place.clusterddp("exec", run.name, "--rank", "3", "--", "true", check=False)
        seen[:] = [done.stderr]
        return done.returncode == 0

    wait_until(is_there, 60, what=lambda: seen)
    return run


def check_command(place: Place, run: RunDir) -> None:
    words = ("sh", "-c", WHERE, 'it\'s "$HOME"')
    done = place.clusterddp("exec", run.name, "--rank", "3", "--", *words, stdin="typed\n", check=False)
    assert (done.stdout, done.returncode) == ('typed node2 3 none it\'s "$HOME"!\n', 7)
    assert "wrong\n" in done.stderr


def check_shell(place: Place, run: RunDir) -> None:
    """Type into a shell: it has the size of this terminal, and Ctrl-C goes to its program."""
    argv = place.rack.argv(
        HEAD,
        place.command("exec", run.name, "--rank", "2"),
        cwd=place.path,
        env={**place.variables(), "TERM": "vt100"},
    )
    with typing_into(argv) as person:
        modes = person.modes()
        person.type("echo on $(uname -n) $(stty size); sleep 600\n")
        person.await_text("on node2 30 100")
        person.type("\x03")
        person.type("exit 5\n")
        assert person.await_exit() == 5
        assert person.modes() == modes
    assert place.status(run)["state"] == "RUNNING"


def test_over_ssh_a_command_runs_on_the_ranks_host_and_ends_with_the_run(ssh_place: SshPlace) -> None:
    run = start_run(ssh_place, OVER_SSH)
    check_command(ssh_place, run)
    check_shell(ssh_place, run)
    beside = ssh_place.start("exec", run.name, "--rank", "2", "--", "sleep", "600")
    wait_until(lambda: [each.host for each in ssh_place.all_processes() if each.role == "x1"] == ["node2"])
    ssh_place.clusterddp("cancel", run.name)
    assert beside.wait(60) != 0
    ssh_place.await_gone(ssh_place.record(run).token)


def test_over_ssh_a_host_that_opens_one_session_per_connection_is_used_all_the_same(rack: Rack) -> None:
    with ssh_place_on(rack) as place, own_ssh_dir(rack) as person, person.sshd("node2", "MaxSessions=1") as sshd:
        person.configure(f"Host node2\n  Port {sshd.port}\n  ControlMaster auto\n  ControlPath ~/.ssh/%C\n")
        key = f"[node2]:{sshd.port} {person.host_key('node2')}\n"
        person.known_hosts.write_text(person.known_hosts.read_text() + key)
        assert person.check("node2").exit_code == 0
        run = start_run(place, OVER_SSH.replace("/opt/bare/bin/python", sys.executable))
        beside = place.start("exec", run.name, "--rank", "2", "--", "sleep", "600")  # it is the ControlMaster
        wait_until(lambda: [each.host for each in place.all_processes() if each.role == "x1"] == ["node2"])
        check_command(place, run)
        assert place.clusterddp("logs", run.name, "--rank", "3").stdout == "\n"
        place.clusterddp("cancel", run.name)
        beside.wait(60)
        place.await_gone(place.record(run).token)


def test_on_slurm_a_command_runs_in_the_job_and_does_not_keep_it(rack: Rack) -> None:
    person = SlurmPerson.at(rack, "beside")
    run = start_run(person, ON_SLURM)
    check_command(person, run)
    facts = "echo $SLURM_JOB_ID $SLURM_STEP_ID; pwd; echo ${CUDA_VISIBLE_DEVICES-None}"
    job_id, step, path, *visible = person.clusterddp("exec", run.name, "--", "sh", "-c", facts).stdout.split()
    assert job_id == person.record(run).job_id
    assert step != "0"
    assert Path(path) == person.path
    assert visible == run.attempt(0).stdout(0).read_text().split()
    check_shell(person, run)
    beside = person.start("exec", run.name, "--", "sleep", "600")
    wait_until(lambda: person.processes(run, ".x0"))
    person.clusterddp("cancel", run.name)
    assert beside.wait(60) != 0
    wait_until(lambda: person.processes(run) == [])
    wait_until(lambda: person.job(str(job_id))["JobState"] == "CANCELLED", 60)
