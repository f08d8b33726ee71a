"""`submit train.slurm` up to sbatch, which is a script that notes what it gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.places.slurm.batch import find_run
from clusterddp.run.attempts import AttemptEnd, end_run
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.run.sweep import find_sweep

SCRIPT = b"#!/bin/bash\n#SBATCH --nodes=2 # caf\xe9\necho hello\n"
SBATCH = """#!/bin/sh
printf '%s\\n' "$PWD" "$@" > {place}/arguments
env -0 > {place}/environment
for word; do case $word in */launcher/sbatch/*) cat "$word" > {place}/script;; esac; done
echo "sbatch: warning: a word of the site" >&2
echo 4711
"""


class Sbatch:
    """What a submit hands to sbatch."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        (place / "sbatch").write_text(SBATCH.format(place=place))
        (place / "sbatch").chmod(0o700)
        for name in ("squeue", "sacct"):
            (place / name).write_text("#!/bin/sh\n")
            (place / name).chmod(0o700)

    @property
    def directory(self) -> str:
        return self._words[0]

    @property
    def options(self) -> list[str]:
        return [word for word in self._words[1 : -len(self.arguments)] if not word.startswith("--comment=")]

    @property
    def arguments(self) -> list[str]:
        """The script and its arguments."""
        at = next(at for at, word in enumerate(self._words) if "/launcher/sbatch/" in word)
        return self._words[at:]

    @property
    def environment(self) -> dict[str, str]:
        pairs = (self.place / "environment").read_bytes().decode().split("\0")
        return dict(pair.partition("=")[::2] for pair in pairs if pair)

    @property
    def _words(self) -> list[str]:
        return (self.place / "arguments").read_text().splitlines()


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sbatch:
    fake = Sbatch(tmp_path / "fake")
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.slurm").write_bytes(SCRIPT)
    monkeypatch.chdir(work)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    monkeypatch.setenv("PATH", f"{fake.place}:{os.environ['PATH']}")
    return fake


def newest(capfd: pytest.CaptureFixture[str]) -> RunDir:
    return RunDir(Path("runs", capfd.readouterr().out.strip()).absolute())


def test_sbatch_runs_in_this_directory_with_this_environment(
    sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SBATCH_QOS": "high", "SLURM_TIME_FORMAT": "%s", "MY_KEY": "a\nb", "LC_ALL": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    assert main(["submit", "train.slurm", "slurm.time=5", "--", "--lr", "0.1", "--", "a=b"]) == 0
    run = newest(capfd)
    assert sbatch.directory == str(Path.cwd())
    of_sh = {"PWD", "OLDPWD", "SHLVL", "_"}
    expected = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERDDP_")}
    assert {name: value for name, value in expected.items() if name not in of_sh} == {
        name: value for name, value in sbatch.environment.items() if name not in of_sh
    }
    file = str(run.launcher_dir / "sbatch" / "train.slurm")
    assert sbatch.arguments == [file, str(run.path), "--lr", "0.1", "--", "a=b"]
    assert sorted(sbatch.options) == ["--parsable", "--time=5"]
    assert run.batch_script.read_bytes() == SCRIPT
    script = b"#!/bin/bash -p\n#SBATCH --nodes=2 # caf\xe9\ntrap '' TERM  # until Python handles it\nexec "
    assert (sbatch.place / "script").read_bytes().startswith(script)
    assert not run.job_environment.exists()
    assert read_run(run).job_id == "4711"


def test_what_sbatch_says_of_the_users_options_is_shown(sbatch: Sbatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train.slurm"]) == 0
    assert "sbatch: warning: a word of the site" in capfd.readouterr().err


def test_resume_submits_the_runs_own_copy_as_the_next_attempt(
    sbatch: Sbatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "train.slurm", "--", "a"]) == 0
    run = newest(capfd)
    Path("train.slurm").unlink()
    end_run(run, AttemptEnd(outcome="COMPLETED", reason="train.slurm exited with code 0"))
    for overrides in ([], ["slurm.time=7"]):
        assert main(["resume", run.name, *overrides]) == 0
        assert sbatch.arguments[1:] == [str(run.path), "a"]
        end_run(run, AttemptEnd(outcome="FAILED", reason="x"))
    assert "--time=7" in sbatch.options
    assert [attempt.number for attempt in run.attempts()] == [0, 1, 2]
    assert run.batch_script.read_bytes() == SCRIPT


def test_submit_of_a_run_takes_the_file_as_it_is_now_or_else_the_runs_copy(
    sbatch: Sbatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "train.slurm", "--", "a"]) == 0
    first = newest(capfd)
    Path("train.slurm").write_bytes(SCRIPT + b"# later\n")
    assert main(["submit", first.name]) == 0
    again = newest(capfd)
    assert again.batch_script.read_bytes() == SCRIPT + b"# later\n"
    assert sbatch.arguments[1:] == [str(again.path), "a"]
    Path("train.slurm").unlink()
    assert main(["submit", again.name, "--", "b", "{rank}"]) == 0
    said = capfd.readouterr()
    assert f"train.slurm is gone: the copy of {again.name} is submitted" in said.err
    assert sbatch.arguments[2:] == ["b", "{rank}"]
    assert RunDir(Path("runs", said.out.strip())).batch_script.read_bytes() == SCRIPT + b"# later\n"


def test_a_value_for_sbatch_may_have_commas_and_brackets(sbatch: Sbatch) -> None:
    values = ("mail_type=END,FAIL", "nodelist=[n1-2]", 'gres="gpu:1,tmp:2"')
    assert main(["submit", "train.slurm", *(f"slurm.{value}" for value in values)]) == 0
    assert {"--mail-type=END,FAIL", "--nodelist=[n1-2]", "--gres=gpu:1,tmp:2"} < set(sbatch.options)


def test_each_task_of_an_array_is_a_run_with_its_number(sbatch: Sbatch, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.slurm").write_bytes(b"#!/bin/sh\n#SBATCH --array=1,5-9:2%3\necho\n")
    assert main(["submit", "train.slurm", "--", "x"]) == 0
    sweep = find_sweep(Path("runs"), capfd.readouterr().out.strip())
    assert sweep is not None
    assert [run.name.rpartition(".")[2] for run in sweep.runs()] == ["1", "5", "7", "9"]
    assert sbatch.options == ["--parsable"]
    assert sbatch.arguments[1:] == [str(sweep.tasks.absolute()), "x"]
    for run in sweep.runs():
        task = run.name.rpartition(".")[2]
        assert find_run(sbatch.arguments[1], {"SLURM_ARRAY_TASK_ID": task}).name == run.name
        assert read_run(run).job_id == f"4711_{task}"
        assert run.batch_script.read_bytes().endswith(b"echo\n")


def test_a_task_of_an_array_goes_on_alone(sbatch: Sbatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train.slurm", "slurm.array=3-4"]) == 0
    sweep = find_sweep(Path("runs"), capfd.readouterr().out.strip())
    assert sweep is not None
    assert "--array=3-4" in sbatch.options
    run = sweep.runs()[1]
    end_run(run, AttemptEnd(outcome="FAILED", reason="x"))
    assert main(["resume", run.name]) == 0
    assert "--array=4" in sbatch.options
    assert sbatch.arguments[1:] == [str(run.path.absolute())]
    assert read_run(run).job_id == "4711_4"


def test_the_dry_run_shows_the_lines_of_sbatch_and_hides_a_secret(
    sbatch: Sbatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "train.slurm", "slurm.time=5", "-n", "--", "--token", "hunter2", "a b"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "#SBATCH --nodes=2" in shown
    assert "override slurm.time=5" in shown
    assert "hunter2" not in shown
    assert "'a b'" in shown
    assert "those that srun, torchrun, mpirun, accelerate and deepspeed start in it" in shown
    assert not Path("runs").exists()
    assert main(["submit", "train.slurm", "-n", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["gang"]["entry"]["kind"] == "batch_script"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--sweep"], "--sweep is for a spec, and this is a batch script"),
        (["--profile", "lab"], "--profile is for a spec, and this is a batch script"),
        (["--hosts", "node1"], "launcher: a batch script is for Slurm"),
        (["train.lr=1"], "train: the batch script has it"),
        (["slurm.array=x"], "--array=x: expected numbers and ranges"),
    ],
)
def test_what_is_not_for_a_batch_script_is_refused(
    sbatch: Sbatch, words: list[str], error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "train.slurm", *words]) == 2
    assert error in capfd.readouterr().err
    assert not (sbatch.place / "arguments").exists()


def test_a_file_without_sbatch_lines_is_submitted_on_demand(sbatch: Sbatch, capfd: pytest.CaptureFixture[str]) -> None:
    Path("plain").write_text("#!/bin/sh\necho\n")
    assert main(["submit", "plain"]) == 2
    assert "--from slurm submits it as it is" in capfd.readouterr().err
    assert main(["submit", "plain", "--from", "slurm"]) == 0


def test_words_behind_two_dashes_of_a_spec_are_refused_as_before(
    sbatch: Sbatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text("name: x\nentry: {command: [ls]}\n")
    assert main(["submit", "job.yaml", "-n", "--", "--lr", "0.1"]) == 2
    assert "entry.args.lr=0.1 sets them" in capfd.readouterr().err
    assert main(["submit", "-n", "--", "job.yaml", "entry.args.lr=1"]) == 0
