"""Runs on hosts that share nothing with the laptop they are submitted from: started, shown, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from clusterddp.run.attempts import AttemptEnd, read_end
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.system.files import read_json, write_json
from tests.support.launch_runs import git
from tests.support.ssh_place import SshPlace, send, ssh_place_on
from tests.support.ssh_traces import command_of
from tests.support.waiting import PATIENCE, wait_until
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

PYTHON = "/opt/bare/bin/python"
SPEC = f"""
name: lan
launcher: ssh
device: cpu
resources: {{procs_per_node: 2}}
ssh: {{hosts: [node1, node2]}}
python: {PYTHON}
"""
TRAIN = SPEC + "train: {dataset: shapes, samples: 256, model: fastnet, width: 0.125, epochs: 1, batch_size: 32}\n"
SLEEP = SPEC + "entry: {script: sleep.py}\n"


@pytest.fixture
def place(ssh_place: SshPlace) -> Iterator[SshPlace]:
    (ssh_place.path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    return ssh_place


def head_end(place: SshPlace, run: RunDir) -> AttemptEnd | None:
    there = place.host_run_dir("node1", run)
    return read_end(there.attempts()[-1])


def await_end(place: SshPlace, run: RunDir, within_s: float = 60) -> AttemptEnd:
    wait_until(lambda: head_end(place, run) is not None, within_s)
    end = head_end(place, run)
    assert end is not None
    return end


def await_started(place: SshPlace, run: RunDir, within_s: float = 40) -> None:
    there = place.host_run_dir("node1", run)
    wait_until(there.attempt(0).start.exists, within_s)


def test_a_file_that_git_ignores_is_named_as_not_uploaded_when_it_is_missing(place: SshPlace) -> None:
    for words in (["init", "-q"], ["config", "user.email", "a@b.c"], ["config", "user.name", "a"]):
        subprocess.run(["git", *words], cwd=place.path, check=True)
    (place.path / ".gitignore").write_text("data/\nruns/\n")
    (place.path / "data").mkdir()
    (place.path / "data" / "train.bin").write_text("x")
    (place.path / "read.py").write_text("open('data/train.bin')\n")
    run = place.submit(SPEC + "entry: {script: read.py}\n")
    status = place.await_state("FAILED", run=run)
    assert status["diagnosis"]["category"] == "data"
    said = "git ignores data, so submit did not upload it: ssh.send or entry.data_dir"
    assert status["diagnosis"]["hint"] == said
    shown = place.clusterddp("status", run.name).stdout
    assert said in " ".join(shown.split())
    assert f"  once fixed clusterddp submit {run.name}" in shown


def test_the_trainer_runs_to_its_end_on_hosts_with_nothing_of_ours(place: SshPlace) -> None:
    run = place.submit(TRAIN)
    end = await_end(place, run)
    assert (end.outcome, end.warning) == ("COMPLETED", "")
    summary = read_json(place.host_run_dir("node1", run).summary)
    assert (summary["world_size"], summary["eval_samples"]) == (4, 51)


def test_a_script_runs_from_the_snapshot_of_the_code_with_the_data_beside_it(place: SshPlace) -> None:
    (place.path / "helper.py").write_text(
        "import pathlib\nWORD = pathlib.Path(__file__).with_name('word.txt').read_text()\n"
    )
    (place.path / "word.txt").write_text("from the snapshot")
    (place.path / "job.py").write_text(
        "import os, helper\nprint(helper.WORD, os.environ['RANK'], os.getcwd(), os.path.isfile('helper.py'))\n"
    )
    run = place.submit(SPEC + "entry: {script: job.py}\n")
    assert await_end(place, run).outcome == "COMPLETED"
    there = place.host_run_dir("node2", run)
    assert "from the snapshot 3 " in there.attempt(0).stdout(3).read_text()


def test_hosts_have_submodules_and_what_is_installed_as_editable_on_the_laptop(place: SshPlace) -> None:
    library, party, site = (place.path / name for name in ("lib/models", "party", "laptop/site-packages"))
    for directory in (library, party, site):
        directory.mkdir(parents=True)
    for package in (library, party):
        (package / "__init__.py").write_text("PLACE = __file__.rpartition('/code/')[2]\n")
    (site / "__editable__.models-1.pth").write_text(f"{library.parent}\n")
    git(party, "init")
    git(party, "add", "-A")
    git(party, "commit", "-m", "one")
    git(place.path, "init")
    (place.path / ".gitignore").write_text("runs/\nlaptop/\n")
    git(place.path, "-c", "protocol.file.allow=always", "submodule", "add", "./party", "party")
    (place.path / "job.py").write_text("import models, party\nprint(models.PLACE, party.PLACE)\n")
    (place.path / "job.yaml").write_text(SPEC + "entry: {script: job.py}\n")
    place.clusterddp("submit", "job.yaml", environ={"PYTHONPATH": str(site)})
    run = place.run_dir()
    assert await_end(place, run).outcome == "COMPLETED"
    logs = place.host_run_dir("node2", run).attempt(0)
    assert logs.stdout(3).read_text() == "lib/models/__init__.py party/__init__.py\n"


def test_ranks_that_meet_on_each_host_alone_are_warned_of(place: SshPlace) -> None:
    (place.path / "apart.py").write_text(
        "import os, torch.distributed as dist\n"
        "os.environ |= {'MASTER_ADDR': 'localhost', 'RANK': os.environ['LOCAL_RANK'], 'WORLD_SIZE': '2'}\n"
        "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    )
    run = place.submit(SPEC + "entry: {script: apart.py}\n")
    end = await_end(place, run)
    assert end.outcome == "COMPLETED"
    assert end.warning.startswith("no rank connected to 10.77.0.11:")
    assert end.warning.endswith("; each of the 4 ranks may have trained alone")


def test_ranks_receive_their_place(place: SshPlace) -> None:
    (place.path / "facts.py").write_text(
        "import json, os\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME A SECRET'\n"
        "print(json.dumps({name: os.environ.get(name) for name in names.split()}))\n"
    )
    text = SPEC + "entry: {script: facts.py}\nenv: {A: $(touch /tmp/canary)}\nsecrets: [SECRET]\n"
    (place.path / "job.yaml").write_text(text)
    place.clusterddp("submit", "job.yaml", environ={"SECRET": "mum-4711-mum"})
    run = place.run_dir()
    assert await_end(place, run).outcome == "COMPLETED"
    printed = json.loads(place.host_run_dir("node2", run).attempt(0).stdout(2).read_text())
    assert printed == {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.77.0.11",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "A": "$(touch /tmp/canary)",
        "SECRET": "mum-4711-mum",
    }
    for node in ("node1", "node2"):
        kept = place.rack.run(node, ["grep", "-rl", "mum-4711-mum", str(place.rack.home(node)), "/tmp"], check=False)
        assert kept.stdout.split() == [path for path in kept.stdout.split() if "/logs/rank-" in path]


def test_every_variable_of_the_laptop_stays_there(place: SshPlace) -> None:
    (place.path / "facts.py").write_text("import os\nprint('LAPTOP' in os.environ, os.environ.get('PYTHONPATH', ''))\n")
    run_text = SPEC + "entry: {script: facts.py}\n"
    (place.path / "job.yaml").write_text(run_text)
    place.clusterddp("submit", "job.yaml", environ={"LAPTOP": "1"})
    run = place.run_dir()
    await_end(place, run)
    assert place.host_run_dir("node1", run).attempt(0).stdout(0).read_text().startswith("False ")


def test_when_a_host_cannot_be_used_nothing_is_started_on_any(place: SshPlace) -> None:
    text = SLEEP.replace("[node1, node2]", "[node1, {host: node2, python: /no/python}]")
    (place.path / "job.yaml").write_text(text)
    done = place.clusterddp("submit", "job.yaml", check=False)
    assert (done.returncode, "there is no /no/python" in done.stderr) == (3, True)
    assert place.all_processes() == []


def test_a_run_whose_start_failed_has_failed_with_that_reason(place: SshPlace) -> None:
    (place.path / "job.yaml").write_text(SLEEP.replace("node2]", "node9]"))
    place.clusterddp("submit", "job.yaml", check=False)
    end = place.end()
    assert (end.outcome, "node9" in end.reason) == ("FAILED", True)


SLOW_TO_START = """\
import pathlib, sys
place = pathlib.Path.home() / "slow"
site = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
site.mkdir(parents=True)
(site / "packages.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))
(site / "sitecustomize.py").write_text(
    "import sys, time\\nif 'clusterddp.node.supervisor' in sys.orig_argv: time.sleep(4)\\n"
)
(place / "bin").mkdir()
(place / "bin" / "python").symlink_to(pathlib.Path(sys.executable).resolve())
(place / "pyvenv.cfg").write_text(pathlib.Path(sys.prefix, "pyvenv.cfg").read_text())
print(place / "bin" / "python")
"""
"""Makes a Python with which a supervisor takes long to start."""


def test_a_start_that_node_0_has_ended_says_why(place: SshPlace) -> None:
    """The others find its port closed, or it gone in the middle of a word."""
    slow = place.rack.run("node2", [PYTHON, "-c", SLOW_TO_START]).stdout.strip()
    (place.path / "job.yaml").write_text(SLEEP.replace("node2]", f"{{host: node2, python: {slow}}}]"))
    process = place.start("submit", "job.yaml")
    wait_until(lambda: list_runs(place.runs_dir), 20)
    wait_until(lambda: any(each.role == "s0" for each in place.processes("node1")), 30)
    write_json(place.host_run_dir("node1").cancel_file, {"by": "another user", "time": time.time()})
    _, stderr = process.communicate(timeout=PATIENCE * 60)
    assert (process.returncode, "node1: node 0 has ended the start: cancelled by another user" in stderr) == (
        3,
        True,
    ), stderr
    assert place.all_processes() == []


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6, 0.9, 1.2, 1.6, 2.0])
def test_a_launcher_killed_in_the_middle_leaves_no_half_of_a_gang(place: SshPlace, after_s: float) -> None:
    (place.path / "job.yaml").write_text(SLEEP)
    process = place.start("submit", "job.yaml")
    wait_until(lambda: list_runs(place.runs_dir), 20)
    time.sleep(after_s)
    send(process, signal.SIGKILL)
    process.wait()
    run = list_runs(place.runs_dir)[0]
    wait_until(lambda: is_whole_or_nothing(place, run), 30)


def is_whole_or_nothing(place: SshPlace, run: RunDir) -> bool:
    """Say whether all ranks of a run live, or nothing of it does."""
    token = place.record(run).token
    found = place.all_processes(token)
    return sorted(each.role for each in found if each.role[0] == "n") == ["n0", "n0", "n1", "n1"] or not found


def test_cancel_ends_everything_everywhere(place: SshPlace) -> None:
    run = place.submit(SLEEP)
    await_started(place, run)
    place.clusterddp("cancel", run.name)
    place.await_gone(within_s=10)
    assert await_end(place, run).outcome == "CANCELLED"


def test_cancel_reaches_what_does_not_answer(place: SshPlace) -> None:
    run = place.submit(SLEEP)
    await_started(place, run)
    for node, role in (("node1", "s0"), ("node2", "s1"), ("node1", "g0"), ("node2", "g1")):
        place.kill(node, role, sig=signal.SIGSTOP)
    place.clusterddp("cancel", run.name)
    place.await_gone(within_s=10)
    assert place.end(run).outcome == "CANCELLED"


def test_a_rank_that_fails_ends_the_gang_on_all_hosts(place: SshPlace) -> None:
    (place.path / "fail.py").write_text(
        "import os, time\nif os.environ['RANK'] == '3':\n    raise ValueError('rank three')\ntime.sleep(600)\n"
    )
    run = place.submit(SPEC + "entry: {script: fail.py}\n")
    end = await_end(place, run)
    assert (end.root_cause.rank, end.root_cause.host, "rank three" in end.root_cause.error) == (3, "node2", True)
    place.await_gone(within_s=10)


def test_restarts_begin_again_on_all_hosts(place: SshPlace) -> None:
    (place.path / "once.py").write_text(
        "import os, sys\nsys.exit(1 if os.environ['CLUSTERDDP_ATTEMPT'] == '0' and os.environ['RANK'] == '2' else 0)\n"
    )
    run = place.submit(SPEC + "restarts: 1\nentry: {script: once.py}\n")
    wait_until(place.host_run_dir("node1", run).attempt(1).end.exists, 40)
    assert await_end(place, run).outcome == "COMPLETED"


def test_resume_goes_on_from_the_checkpoint_of_the_first_host(place: SshPlace) -> None:
    run = place.submit(TRAIN.replace("epochs: 1", "epochs: 2000, checkpoint_every: 1, log_every: 1"))
    there = place.host_run_dir("node1", run)
    wait_until(lambda: any(there.checkpoints.glob("*.pt")), 60)
    place.clusterddp("cancel", "--save", run.name)
    assert await_end(place, run).outcome == "STOPPED"
    place.clusterddp("resume", run.name)
    wait_until(there.attempt(1).start.exists, 40)
    wait_until(lambda: "resumed from" in there.attempt(1).stderr(0).read_text(), 40)
    place.clusterddp("cancel", run.name)


def test_a_detached_run_does_not_notice_the_end_of_its_launcher(lan: Rack) -> None:
    with ssh_place_on(lan) as place:
        (place.path / "wait.py").write_text(
            "import time\nfor i in range(60):\n    print(i, flush=True)\n    time.sleep(0.1)\n"
        )
        run = place.submit(SPEC + "entry: {script: wait.py}\n")
        await_started(place, run)
        sessions = [pid for pid in lan.pids("node1") if b"sshd: root" in command_of(pid)]
        for pid in sessions:
            os.kill(pid, signal.SIGKILL)
        assert await_end(place, run).outcome == "COMPLETED"
        assert place.host_run_dir("node2", run).attempt(0).stdout(3).read_text().endswith("59\n")
