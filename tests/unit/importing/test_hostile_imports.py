"""Hostile files and lists of hosts: each is read or refused within seconds, and the limit is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError, SpecError, UsageError
from clusterddp.importing.files import Findings
from clusterddp.importing.reading import MAX_SCRIPT, import_files
from clusterddp.network.hostlist import expand
from clusterddp.ranks.slurm_step import expand_counts
from clusterddp.spec.fields import MAX_HOSTS
from clusterddp.spec.hosts import expand_all, parse_hosts, read_hostfile
from clusterddp.spec.load import load_spec
from clusterddp.spec.secret_values import is_secret

HEAD = "#!/bin/bash\n#SBATCH -N 1\n"
TRAIN = "srun python train.py\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\n"
SECONDS = 10
"""Of the processor: the files that are refused here were busy for minutes, or took all memory."""


def bomb(levels: int = 9) -> str:
    lines = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join([ACCELERATE + "a0: &a0 [x, x, x, x, x, x, x, x, x]", *lines])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.yaml", bomb(), "anchors (&a0) are not allowed"),
        ("config.yaml", ACCELERATE + "num_machines: 99999999", "num_machines is 99999999, expected at most 65,536"),
        ("config.yaml", ACCELERATE + "a: 1\na: 2\n", 'duplicate key "a"'),
        ("config.yaml", ACCELERATE + "x" * 1_000_000, "is larger than 1 MB, expected a file of another launcher"),
        ("ddp.yaml", "DDP_CONFIG: {WOLRD_URLS: 5}", "DDP_CONFIG.WOLRD_URLS is 5, expected a list"),
        ("t.slurm", HEAD + "#" * MAX_SCRIPT, "is larger than 250,000 characters, expected a batch script"),
    ],
    ids=["aliases", "machines", "twice", "size", "no list", "script"],
)
def test_a_file_that_would_take_all_time_or_memory_is_refused_by_its_limit(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    started = time.process_time()
    with pytest.raises(ClusterddpError) as caught:
        import_files([tmp_path / name])
    problems = caught.value.problems if isinstance(caught.value, SpecError) else ()
    assert words in " ".join([caught.value.message, *(problem.message for problem in problems)])
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize(
    "lines",
    [
        "\n" * 240_000,
        "export A='://" + ":" * 60_000 + "'\n",
        "echo {" + "," * 200_000 + "\n",
        "echo " + "a" * 200_000 + "\n",
        'A="' + "$(x) " * 20_000 + '"\n',
        "a\n" * 20_000,
        "export A=" + "b" * 5_000 + "\n" + "echo $A\n" * 500,
    ],
    ids=["lines", "address", "braces", "word", "unknown", "commands", "values"],
)
def test_a_long_script_is_read_in_a_time_that_grows_with_its_length(tmp_path: Path, lines: str) -> None:
    (tmp_path / "t.slurm").write_text(HEAD + lines + TRAIN)
    started = time.process_time()
    entry = import_files([tmp_path / "t.slurm"]).resolved.job.entry
    assert entry is not None
    assert entry.script == "train.py"
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize("lines", ['echo "' + '$("' * 60_000, "A=(" * 60_000], ids=["quotes", "arrays"])
def test_what_is_nested_without_end_is_refused(tmp_path: Path, lines: str) -> None:
    (tmp_path / "t.slurm").write_text(f"{HEAD}{TRAIN}{lines}\n")
    started = time.process_time()
    with pytest.raises(UsageError, match=r"t\.slurm:4: "):
        import_files([tmp_path / "t.slurm"])
    assert time.process_time() - started < SECONDS


def test_numbers_of_thousands_of_digits_are_refused_and_not_computed(tmp_path: Path) -> None:
    huge = "9" * 6_000
    for option in ("--nproc_per_node", "--max_restarts", "--nnodes"):
        (tmp_path / "t.slurm").write_text(f"#SBATCH -N 1\nsrun torchrun {option}={huge} train.py\n")
        with pytest.raises(UsageError, match=option.lstrip("-").replace("_", ".")):
            import_files([tmp_path / "t.slurm"])


def test_an_address_with_a_password_is_a_secret_however_long_it_is() -> None:
    started = time.process_time()
    assert not is_secret("A", "://" + ":" * 60_000)
    assert is_secret("A", "https://ana:" + ":" * 60_000 + "@host")
    findings = Findings(source="t.slurm")
    findings.lose("a" * 60_000 + " 1_TOKEN=hidden", "why")
    assert "hidden" not in findings.left[0].text
    assert time.process_time() - started < SECONDS


def test_a_list_of_ten_thousand_nodes_from_slurm_is_read() -> None:
    assert len(expand("node[00001-10000]")) == 10_000
    assert len(expand(",".join(f"node{number}" for number in range(0, 20_000, 2)))) == 10_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n[1-65000],m[1-65000]", "column 14: these are more than 65,536 hosts"),
        ("n[1-9]" + "a[1]" * 100_000, "column 1: a host name of more than 255 characters"),
        ("x" * 900_000 + "[1-65000]", "column 1: a host name of more than 255 characters"),
    ],
)
def test_a_host_list_that_expands_without_end_is_refused_before_it_is_expanded(text: str, words: str) -> None:
    started = time.process_time()
    with pytest.raises(ClusterddpError, match=words):
        expand(text)
    assert time.process_time() - started < SECONDS


def test_counts_of_tasks_have_a_limit_together() -> None:
    with pytest.raises(ClusterddpError, match="tasks per node"):
        expand_counts(",".join(["1(x900000)"] * 1_000))


def test_a_spec_of_too_many_hosts_is_refused_by_its_place() -> None:
    text = 'name: a\nlauncher: ssh\nssh:\n  hosts: ["a[1-4000]", "b[1-97]", c]\n'
    with pytest.raises(SpecError) as caught:
        load_spec(text, environ={})
    problem = caught.value.problems[0]
    assert (problem.key, problem.line) == ("ssh.hosts", 4)
    assert problem.message == 'more than 4,096 hosts, counted up to entry 2, "b[1-97]"'


def test_a_spec_may_have_the_number_of_hosts_that_is_documented() -> None:
    text = 'name: a\nlauncher: ssh\nssh: {hosts: ["a[1-4096]"]}\n'
    assert load_spec(text, environ={}).job.resources.nodes == MAX_HOSTS


def test_hosts_that_expand_to_a_quarter_of_a_million_are_refused_within_seconds() -> None:
    sets = ", ".join(f'"n{number}[1-65000]"' for number in range(40_000))
    started = time.process_time()
    with pytest.raises(SpecError) as caught:
        load_spec(f"name: a\nlauncher: ssh\nssh: {{hosts: [{sets}]}}\n", environ={})
    assert [problem.key for problem in caught.value.problems] == ["ssh.hosts"]
    assert time.process_time() - started < SECONDS * 2


def test_a_hostfile_of_too_many_lines_is_refused_at_the_line(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu slots=2\n" * 80_000)
    with pytest.raises(SpecError) as caught:
        read_hostfile(tmp_path / "hostfile")
    assert [(problem.line, problem.message) for problem in caught.value.problems] == [(4_097, "more than 4,096 hosts")]


def test_an_imported_hostfile_of_too_many_hosts_is_refused_by_the_number(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu[1-65000] slots=2\n" * 5)
    with pytest.raises(UsageError, match="more than 4,096 hosts"):
        import_files([tmp_path / "hostfile"])


def test_hosts_of_the_command_line_have_the_same_limit() -> None:
    with pytest.raises(UsageError, match="more than 4,096 hosts"):
        expand_all(["a[1-4000]", "b[1-4000]"])
    started = time.process_time()
    parse_hosts("a," * 60_000)
    assert time.process_time() - started < SECONDS
