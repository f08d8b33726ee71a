"""`clusterddp explain`: what it says of a variable is what the launcher's own variables say in the end."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.explain import explain
from clusterddp.cli.terminal import Terminal
from clusterddp.ranks.launched import find_place
from tests.support.launcher_variables import HAND, HYDRA, OPEN_MPI, STEP, TORCHRUN

JOB = "name: job\nentry: {module: train}\nenv: {WHO: me}\n"


def ask(tmp_path: Path, *arguments: str) -> str:
    (tmp_path / "job.yaml").write_text(JOB)
    done = CliRunner().invoke(explain, [str(tmp_path / "job.yaml"), *arguments], obj=Terminal({}))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [("srun", STEP), ("mpirun (Open MPI)", OPEN_MPI), ("mpirun (MPICH)", HYDRA), ("by hand", HAND)],
)
def test_it_names_the_variable_that_is_read(tmp_path: Path, launcher: str, environ: dict[str, str]) -> None:
    said = json.loads(ask(tmp_path, "-o", "json"))[launcher]
    origins = {
        name: variable.origin for name, variable in find_place(environ).variables.items() if "MASTER" not in name
    }
    assert {name: said[name].split(",")[0] for name in origins} == origins


def test_what_torchrun_sets_is_torchruns(tmp_path: Path) -> None:
    said = json.loads(ask(tmp_path, "-o", "json"))["torchrun"]
    assert {said[name] for name in TORCHRUN} == {"torchrun"}


def test_the_specs_own_variables_are_the_specs_under_every_launcher(tmp_path: Path) -> None:
    said = json.loads(ask(tmp_path, "-o", "json"))
    assert said.pop("schema") == 1
    assert {origins["WHO"] for origins in said.values()} == {"env in the spec"}


def test_one_launcher_may_be_picked(tmp_path: Path) -> None:
    assert ask(tmp_path, "--under", "srun").splitlines()[0] == "srun"


def test_no_line_is_wider_than_a_terminal(tmp_path: Path) -> None:
    assert [line for line in ask(tmp_path).splitlines() if len(line) > 120] == []
