"""What holds for any batch script: nothing is executed, nothing is lost without a word, what is written reads."""

from __future__ import annotations

import contextlib
import os
import string
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.importing.files import Findings
from clusterddp.importing.reading import import_files
from clusterddp.importing.script import read_batch_script
from clusterddp.spec.load import load_spec
from clusterddp.spec.sbatch_lines import SIZES

_COMMON = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
_STARTED: list[str] = []
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "exec.shell"})
_WORDS = """\
srun python torchrun train.py -n 4 --nproc_per_node 2 export A=1 $A ${A} $(touch canary) `touch canary` ' \" \\ ; && | &
( ) { } <<EOF EOF > # #SBATCH -N --mem=1G if then fi bash -c = * ~ mpirun -x accelerate launch ARGS=( ${ARGS[@]}
-H a:2,b[1-3] -np --hostfile hosts --map-by ppr:2:node --nnodes 1:3 --num_machines -w n[1-2]
deepspeed --include a:0@b horovodrun
\x1b[31m é"""
_TOKENS = st.sampled_from([*_WORDS.split(), "\u2028", "\n", " "])
_SCRIPTS = st.lists(_TOKENS, max_size=40).map(" ".join)
_VALUE = st.text(alphabet=string.ascii_letters + string.digits + "_.,:/@%+-", min_size=1, max_size=12).filter(
    lambda text: not text.startswith("-")
)
_OPTIONS = """\
partition account qos constraint reservation licenses mail-user mail-type gres mem time nodes ntasks gpus cpus-per-task
begin nodelist exclude comment output array signal an-option-of-a-plugin switches gpus-per-node job-name export tmp
priority ntasks-per-node cpus-per-gpu ntasks-per-gpu gpus-per-task"""
_NAMES = st.sampled_from(_OPTIONS.split())


def _hear(event: str, arguments: object) -> None:
    if event in _STARTS:
        _STARTED.append(event)


sys.addaudithook(_hear)  # there is no taking it off again; it only counts


@_COMMON
@given(text=st.one_of(_SCRIPTS, st.text(max_size=200)))
def test_any_script_becomes_a_spec_that_reads_or_is_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    place = tmp_path_factory.mktemp("import")
    path = place / "train.slurm"
    path.write_text("#SBATCH -N 1\n" + text, encoding="utf-8", errors="replace")
    _STARTED.clear()
    with contextlib.suppress(ClusterddpError):
        imported = import_files([path])
        assert load_spec(imported.text, environ={}).job == imported.resolved.job
        comments = [line for line in imported.text.split("\n") if line.startswith("#")]
        assert all(line.isprintable() for line in comments)
    assert (_STARTED, os.listdir(place)) == ([], ["train.slurm"])


@_COMMON
@given(options=st.dictionaries(_NAMES, _VALUE, max_size=8))
def test_no_option_is_lost_without_a_word(tmp_path_factory: pytest.TempPathFactory, options: dict[str, str]) -> None:
    path = Path(tmp_path_factory.mktemp("import") / "train.slurm")
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    path.write_text("\n".join([*lines, "srun python train.py"]))
    try:
        imported = import_files([path], kind="slurm")
    except UsageError:
        return
    spec, listed = imported.text, " ".join(f"{each.text} {each.why}" for each in imported.left)
    for name, value in options.items():
        key = name.replace("-", "_")
        elsewhere = key in SIZES | {"time", "mem", "job_name", "export"}  # the next test looks at these
        assert f"  {key}: " in spec or f"--{name}=" in listed or f"slurm.{key}" in listed or elsewhere, (name, value)


@_COMMON
@given(name=_NAMES, value=_VALUE)
def test_an_option_whose_value_cannot_be_used_is_listed_or_refused(name: str, value: str) -> None:
    findings = Findings(source="train.slurm")
    try:
        read_batch_script(f"#SBATCH --{name}={value}\nsrun python train.py\n", findings)
    except UsageError as error:
        assert f"--{name}={value}" in error.message  # noqa: PT017
        return
    kept = str(findings.values)
    listed = " ".join(f"{each.text} {each.why}" for each in findings.left)
    digits = "".join(char for char in value if char.isdigit()).lstrip("0")
    listed_or_kept = all(part in kept or part in listed for part in value.split(","))
    is_minutes = name == "time" and value == digits
    assert listed_or_kept or (digits and digits in kept) or is_minutes, (findings.values, listed)
