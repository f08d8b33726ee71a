"""`init`: what it writes, and what it leaves to shared files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec
from tests.support.slurm_clusters import fake_commands

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


def test_the_usual_launcher_is_this_machine(place: Path) -> None:
    assert main(["init"]) == 0
    assert (written(place).launcher, written(place).entry) == ("local", None)


def test_with_sbatch_on_the_path_the_launcher_is_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in fake_commands("mixed_24_05", tmp_path / "commands").items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "commands" / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "commands" / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert written(tmp_path).launcher == "slurm"


@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm"])
def test_the_only_script_is_what_the_ranks_run(launcher: str, place: Path) -> None:
    (place / "hostfile").write_text("gpu01\n")
    (place / "train.py").write_text(DDP)
    (place / "plot.py").write_text(PROGRAM)
    (place / "model.py").write_text("x = 1\n")
    assert main(["init", "--launcher", launcher]) == 0
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


def test_the_hosts_of_a_hostfile_are_taken(place: Path) -> None:
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
