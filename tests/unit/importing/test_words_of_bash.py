"""What is taken as plain words is what bash makes of them; the rest is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clusterddp.errors import UsageError
from clusterddp.importing.files import Findings
from clusterddp.importing.script import read_batch_script

_PIECES = st.sampled_from(
    ["a", "B=1", " ", "  ", "'", '"', "\\", "$", "$A", "${A}", "$SLURM_NNODES", "${SLURM_NNODES}", "#", " #", "`", "(",
     ")", "{", "}", "[", "]", "*", "?", "~", "!", "|", "&", ";", "<", "> x", "2> x", "2>&1", "=", "-n", "é", "\\\n",
     "\n", "$(", "$((", "''", '""', "\\$", "\\\\", "%", "^", ",", ":", "@"]
)  # fmt: skip


def words_of_bash(line: str, place: Path) -> list[str]:
    """Return the arguments that bash gives to srun in this line."""
    script = f"export SLURM_NNODES=1\nset -f\nsrun() {{ printf '%s\\0' \"$@\" >&7; }}\nA=f\n{line}\n"
    (place / "script").write_text(script)
    command = ["/bin/bash", "--norc", "-c", "exec 7>&1; . ./script 2> /dev/null > /dev/null < /dev/null"]
    done = subprocess.run(
        command, cwd=place, capture_output=True, check=False, env={"PATH": "/nowhere", "HOME": str(place)}
    )
    return done.stdout.decode().split("\0")[:-1]


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(text=st.lists(_PIECES, max_size=12).map("".join))
@example(text="\\\\\na")
def test_plain_words_are_those_of_bash(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    line = f"srun python t.py {text}"
    findings = Findings(source="t.slurm")
    try:
        read_batch_script(f"#SBATCH -N 1\n{line}\n", findings)
    except UsageError:
        return
    entry = findings.values["entry"]
    found = ["python", entry["script"], *(re.sub(r"\{(\{[a-z]+\})\}", r"\1", word) for word in entry.get("args", []))]
    assert words_of_bash(line, tmp_path_factory.mktemp("bash")) == found
