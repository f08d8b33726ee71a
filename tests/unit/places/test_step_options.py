"""Where srun's options end in front of a program: the real srun says which of them take the next word."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clusterddp.spec.launch_options import SRUN

CONFIGURATION = "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nNodeName=localhost\nPartitionName=p Nodes=ALL\n"


def takes_a_word(option: str, configuration: Path) -> bool | None:
    """Return whether srun takes the next word as the value of an option; None: this srun does not know it."""
    done = subprocess.run(
        ["srun", option, "--no-such-option"],
        env={"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if f"unrecognized option '{option}'" in done.stderr or "invalid option" in done.stderr:
        return None
    return "unrecognized option '--no-such-option'" not in done.stderr


@pytest.mark.skipif(not shutil.which("srun"), reason="needs Slurm's srun")
def test_options_of_srun_take_the_words_that_srun_takes(tmp_path: Path) -> None:
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(CONFIGURATION)
    names = {f"--{name.replace('_', '-')}": name for name in SRUN.flags | SRUN.optional | SRUN.values}
    shorts = {f"-{letter}": name for letter, name in SRUN.shorts.items()}
    at_once = {"help", "usage", "version", "autocomplete"}  # srun ends there
    ours, real = {}, {}
    for option, name in (names | shorts).items():
        if name not in at_once and (taken := takes_a_word(option, configuration)) is not None:
            real[option] = taken
            ours[option] = name not in SRUN.flags | SRUN.optional
    assert len(real) > 100
    assert ours == real
