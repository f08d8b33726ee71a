"""Commands that earlier versions had: what to type instead."""

from __future__ import annotations

import pytest

from clusterddp.cli.main import main


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("shell", "clusterddp exec RUN opens a shell"),
        ("share", "chgrp and chmod open a run to a group"),
        ("explain", "clusterddp submit SPEC -n -v"),
        ("du", "clusterddp list --wide"),
        ("rerun", "clusterddp submit RUN"),
        ("hosts trust", "type ssh HOST once"),
        ("join", "type clusterddp worker SPEC on each machine of ssh.hosts"),
        ("relay", "your script calls W&B, MLflow or Trackio"),
    ],
)
def test_a_removed_command_names_what_to_type_instead(
    command: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "@last"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f'error: the command "{command}" was removed'
    assert hint.startswith(f"hint: {instead}")
