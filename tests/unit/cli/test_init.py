"""`init`: what it asks on a terminal, what it writes without one, and what it leaves to shared files."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.places.ssh.config import config_names
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec
from tests.support.paths import ROOT
from tests.support.slurm_clusters import fake_commands
from tests.support.waiting import PATIENCE

DDP = "import torch.distributed as dist\n"
PROGRAM = 'if __name__ == "__main__":\n    print(1)\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without sbatch on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CLUSTERDDP_SITE", "")
    return tmp_path


def written(place: Path) -> JobSpec:
    return load_spec(place / "job.yaml", environ={"CLUSTERDDP_SITE": ""}).job


class OnTerminal:
    """`clusterddp init` on a terminal."""

    def __init__(self, place: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.shown = ""
        self._master, slave = pty.openpty()
        usual = {"PATH": "/nowhere", "HOME": str(place), "TERM": "dumb", "CLUSTERDDP_SITE": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "clusterddp", "init", *arguments],
            cwd=place,
            env=usual | {"PYTHONPATH": str(ROOT)} | (environ or {}),
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)

    def answer(self, question: str, text: str) -> None:
        """Wait for a question, and type an answer."""
        self._read_until(lambda: self.shown.rpartition(question)[2].endswith(": ") and question in self.shown)
        os.write(self._master, text.encode() + b"\n")
        self.shown = ""

    def interrupt(self, question: str) -> None:
        self._read_until(lambda: question in self.shown)
        time.sleep(0.5)  # until it reads: a signal just before that is seen after the next key only
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read what is left; return the exit code."""
        self._read_until(lambda: False)
        os.close(self._master)
        return self._process.wait(timeout=30 * PATIENCE)

    def _read_until(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30 * PATIENCE
        while not is_there() and time.monotonic() < deadline:
            if not select.select([self._master], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(self._master, 4096)
            except OSError:  # the other end is closed
                return
            self.shown += data.decode().replace("\r\n", "\n")


def test_without_a_terminal_nothing_is_asked(place: Path) -> None:
    assert main(["init"]) == 0
    assert (written(place).launcher, written(place).entry) == ("local", None)


def test_with_sbatch_on_the_path_the_launcher_is_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in fake_commands("mixed_24_05", tmp_path / "commands").items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "commands" / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "commands" / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--yes"]) == 0
    assert written(tmp_path).launcher == "slurm"


@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm"])
def test_the_only_script_is_what_the_ranks_run(launcher: str, place: Path) -> None:
    (place / "hostfile").write_text("gpu01\n")
    (place / "train.py").write_text(DDP)
    (place / "plot.py").write_text(PROGRAM)
    (place / "model.py").write_text("x = 1\n")
    assert main(["init", "--yes", "--launcher", launcher]) == 0
    entry = written(place).entry
    assert entry is not None
    assert entry.script == "train.py"
    assert '# args: [--lr, 0.1, --out, "{output_dir}"]' in (place / "job.yaml").read_text()
    assert main(["submit", "job.yaml", "-n"]) == 0
    assert main(["init", "--force", "--launcher", launcher, "--script", "none"]) == 0
    assert written(place).train is not None


def test_of_several_scripts_none_is_chosen_and_a_program_is_one(place: Path) -> None:
    (place / "my train.py").write_text(PROGRAM)
    assert main(["init"]) == 0
    entry = written(place).entry
    assert entry is not None
    assert entry.script == "my train.py"
    (place / "other.py").write_text(PROGRAM)
    assert main(["init", "--force"]) == 0
    assert written(place).entry is None


def test_hosts_are_written_as_they_are_typed(place: Path) -> None:
    assert main(["init", "--hosts", "gpu01,gpu[03-04]:4"]) == 0
    hosts = written(place).ssh.hosts
    assert [(host.host, host.gpus) for host in hosts] == [("gpu01", None), ("gpu[03-04]", 4)]


def test_without_a_terminal_the_hosts_of_a_hostfile_are_taken(place: Path) -> None:
    (place / "hostfile").write_text("gpu01 slots=4\ngpu02 slots=4\n")
    assert main(["init", "--launcher", "ssh"]) == 0
    assert [(host.host, host.gpus) for host in written(place).ssh.hosts] == [("gpu01", 4), ("gpu02", 4)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "-oProxyCommand=x"], "expected a host or a set of hosts"),
        (["--hosts", "a,a"], "a is named twice"),
        (["--hosts", "a", "--launcher", "slurm"], "--hosts is for --launcher ssh"),
        (["--partition", "a", "--launcher", "ssh"], "--partition is for --launcher slurm"),
        (["--hosts", "a", "--partition", "b"], "--hosts is for --launcher ssh"),
        (["--script", "no.py"], "no.py: there is no such file here"),
    ],
)
def test_a_wrong_answer_on_the_command_line_writes_nothing(
    arguments: Sequence[str], words: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    assert words in capfd.readouterr().err
    assert not (place / "job.yaml").exists()


def test_what_shared_files_give_is_left_out_with_their_name(place: Path) -> None:
    shared = place / "clusterddp.yaml"
    shared.write_text("launcher: ssh\nssh: {hosts: [a, b]}\nresources: {procs_per_node: 2}\n")
    shared.chmod(0o644)
    before = shared.read_bytes()
    assert main(["init"]) == 0
    text = (place / "job.yaml").read_text()
    assert "# launcher: ssh               # clusterddp.yaml has launcher" in text
    assert "  # hosts: [gpu01, gpu02]     # clusterddp.yaml has ssh.hosts" in text
    assert "  # gpus_per_node: 1          # clusterddp.yaml has resources.procs_per_node" in text
    assert [host.host for host in written(place).ssh.hosts] == ["a", "b"]
    assert main(["init", "--force", "--hosts", "c"]) == 0
    assert [host.host for host in written(place).ssh.hosts] == ["c"]
    assert main(["init", "--force", "--launcher", "local"]) == 0
    assert written(place).launcher == "local"
    assert shared.read_bytes() == before


def test_on_a_terminal_wrong_answers_are_refused_at_once_with_the_reason(place: Path) -> None:
    (place / "hostfile").write_text("gpu01\n")
    (place / "train.py").write_text(DDP)
    screen = OnTerminal(place)
    screen.answer("launcher (local, ssh, slurm) [local]", "pbs")
    screen.answer("'pbs' is not one of", "ssh")
    screen.answer("hosts [gpu01]", "gpu01,gpu01")
    screen.answer("gpu01 is named twice", "gpu01,gpu02")
    screen.answer("script [train.py]", "no.py")
    screen.answer("no.py: there is no such file here", "")
    assert screen.end() == 0, screen.shown
    job = written(place)
    assert (job.launcher, [host.host for host in job.ssh.hosts]) == ("ssh", ["gpu01", "gpu02"])
    assert job.entry is not None
    assert job.entry.script == "train.py"


def test_on_a_terminal_the_partitions_of_the_cluster_are_offered(tmp_path: Path) -> None:
    environ = fake_commands("mixed_24_05", tmp_path / "commands")
    screen = OnTerminal(tmp_path, "--launcher", "slurm", environ=environ)
    screen.answer("partition (", "no-such")
    screen.answer("'no-such' is not one of", "")
    assert screen.end() == 0, screen.shown
    assert "partition" in written(tmp_path).slurm


def test_on_a_terminal_nothing_is_asked_with_yes_or_where_nothing_is_to_choose(place: Path) -> None:
    (place / "hostfile").write_text("gpu01\n")
    (place / "train.py").write_text(DDP)
    screen = OnTerminal(place, "--yes")
    assert screen.end() == 0, screen.shown
    assert written(place).launcher == "local"


def test_ctrl_c_at_a_question_leaves_nothing(place: Path) -> None:
    (place / "train.py").write_text(DDP)
    screen = OnTerminal(place, "--launcher", "local")
    screen.interrupt("script [train.py]: ")
    assert screen.end() == 130
    assert "interrupted: nothing was written" in screen.shown
    assert sorted(path.name for path in place.iterdir()) == ["train.py"]


def test_hops_and_hosts_of_git_are_not_offered(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host *.lab !x\nHost bastion\n  User me\nHost gpu01 gpu02\n  ProxyJump me@bastion:22\n"
        "Host github.com\n  User git\nInclude more\n"
    )
    (tmp_path / "more").write_text("Host gpu03\n")
    assert config_names(config, machines_only=True) == ["gpu01", "gpu02", "gpu03"]
