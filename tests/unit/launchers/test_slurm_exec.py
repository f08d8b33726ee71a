"""The step of a command beside a rank on Slurm, as the argv of srun."""

from __future__ import annotations

import pytest

from clusterddp.errors import UsageError
from clusterddp.launchers.exec_command import ExecCommand
from clusterddp.launchers.slurm.exec_step import refuse_container, step_argv
from clusterddp.system.keyboard import Keyboard


def exec_command(*, terminal: bool | None = None) -> ExecCommand:
    keyboard = None if terminal is None else Keyboard(terminal=terminal)
    return ExecCommand(host="gpu02", node_rank=1, ranks=(5,), argv=("nvidia-smi",), keyboard=keyboard)


def test_the_step_is_on_the_ranks_node_and_overlaps_where_steps_would_not_share() -> None:
    argv = step_argv("123", exec_command(), cpus_per_task="8", version=(22, 5))
    assert {"--jobid=123", "--overlap", "--nodelist=gpu02", "--ntasks=1", "--cpus-per-task=8"} <= set(argv)
    assert "--overlap" not in step_argv("123", exec_command(), cpus_per_task="8", version=(20, 2))


def test_before_steps_share_gpus_the_step_asks_for_none() -> None:
    versions = ((20, 11), (21, 8), (22, 5))
    found = [step_argv("123", exec_command(), cpus_per_task="8", version=version) for version in versions]
    assert ["--gres=none" in argv for argv in found] == [True, True, False]


def test_only_a_terminal_gets_a_pseudoterminal() -> None:
    found = [
        step_argv("1", exec_command(terminal=each), cpus_per_task="1", version=(22, 5)) for each in (None, False, True)
    ]
    assert [("--pty" in argv, "--unbuffered" in argv) for argv in found] == [
        (False, True),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("runtime", "words"),
    [("pyxis", "--pty --container-image=a.sqsh /bin/sh"), ("apptainer", "--pty apptainer exec a.sqsh /bin/sh")],
)
def test_ranks_in_a_container_are_refused_with_the_command_that_enters_the_image(runtime: str, words: str) -> None:
    step = step_argv("123", exec_command(terminal=True), cpus_per_task="8", version=(22, 5))
    with pytest.raises(UsageError) as refused:
        refuse_container("brisk-otter-3", {"image": "a.sqsh", "runtime": runtime}, exec_command(), step)
    hint = str(refused.value.hint)
    assert hint.startswith("another container of its image on gpu02: srun --jobid=123 --overlap ")
    assert hint.endswith(words)
