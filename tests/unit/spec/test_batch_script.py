"""A batch script as a file: which files are one, what sbatch refuses, which lines sbatch reads."""

from pathlib import Path

import pytest

from clusterddp.errors import SpecError, UsageError
from clusterddp.spec.batch_script import (
    demand_batch_script,
    head_of,
    is_batch_script,
    options_of,
    read_array,
    spec_name,
    spec_of,
)
from clusterddp.spec.load import load_spec
from clusterddp.spec.yamlfile import spec_yaml

SCRIPT = b'#!/bin/bash -l\n#SBATCH --nodes=2 --comment="my own"\n  # caf\xe9\n\n#SBATCH -D sub\nsrun x\n#SBATCH -t 5\n'


def load(*overrides, args=()):
    return load_spec(spec_yaml(spec_of(Path("my train.slurm"), args)), overrides, environ={}, whole=True).job


def test_a_file_with_an_interpreter_and_sbatch_lines_is_a_batch_script():
    assert is_batch_script(Path("train.slurm"), SCRIPT)
    assert is_batch_script(Path("train"), b"#SBATCH -N1\n")  # sbatch says what it lacks


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("job.yaml", SCRIPT),
        ("job", b"name: x\n"),
        ("job", b""),
        ("job", b"#!/usr/bin/env python\n"),
    ],
)
def test_a_spec_is_none(name, data):
    assert not is_batch_script(Path(name), data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"#!/bin/sh\nls\n#SBATCH -N1\n", "after its first command"),
        (b"#!/bin/sh\n#PBS -l nodes=1\n", "for another scheduler: it has #PBS lines"),
        (b"#!/bin/sh\npython train.py\n", "without #SBATCH lines"),
    ],
)
def test_another_script_is_refused_with_the_option_that_takes_it(data, words):
    with pytest.raises(UsageError, match=words) as caught:
        is_batch_script(Path("x.sh"), data)
    assert "--from slurm" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"#SBATCH -N1\n", "without #! in its first line"),
        (b"#!/bin/sh\n\0", "a NUL character"),
        (b"#!/bin/sh\nls\r\n", "line ends of DOS .*found in line 2"),
    ],
)
def test_what_sbatch_refuses_is_refused_with_the_reason(data, words):
    with pytest.raises(UsageError, match=words):
        demand_batch_script(Path("x.sh"), data)


@pytest.mark.parametrize("data", [SCRIPT, b"#!/bin/sh", b"#!/bin/sh\n#SBATCH -n1"])
def test_a_batch_script_is_taken(data):
    demand_batch_script(Path("x.sh"), data)


def test_the_head_has_all_lines_before_the_first_command_byte_for_byte():
    assert head_of(SCRIPT) == b'#SBATCH --nodes=2 --comment="my own"\n  # caf\xe9\n\n#SBATCH -D sub\n'
    assert head_of(b"#!/bin/sh\n#SBATCH -n1") == b"#SBATCH -n1"
    assert head_of(b"#!/bin/sh") == b""


def test_the_options_of_the_script_are_read_and_those_that_nobody_knows_are_left_to_sbatch():
    given = options_of(SCRIPT)
    assert {name: given.value(name) for name in given} == {"nodes": "2", "comment": "my own", "chdir": "sub"}
    assert options_of(SCRIPT, {"nodes": "3"}).value("nodes") == "3"
    assert options_of(b"#!/bin/sh\n#SBATCH -8 7\n#SBATCH -N 3\n").value("nodes") == "3"


def test_arguments_are_words_whatever_they_look_like():
    args = ("--lr", "0.10", "{rank}", "a=b", "true", "null", "", "é\U0001f600\x7f\u2028", "--")
    assert load(args=args).entry.args == args


def test_the_name_is_the_stem_of_the_file():
    assert load().name == "my_train"
    assert spec_name("...") == "imported"


def test_the_command_line_overrides_any_option_of_the_script():
    job = load("slurm.nodes=2", "slurm.time=10", "slurm.output=x", "slurm.array=0-3", "slurm.export=NONE", "hang=fail")
    assert job.slurm == {"nodes": "2", "time": "10", "output": "x", "array": "0-3", "export": "NONE"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env.X=1", "env: the batch script has it"),
        ("resources.nodes=2", "resources: the batch script has it"),
        ("restarts=1", "restarts: the batch script has it"),
        ("launcher=ssh", "launcher: a batch script is for Slurm"),
        ("entry.script=x.py", "entry.script: a batch script has arguments, and nothing else"),
        ("slurm.wrap=ls", "slurm.wrap: clusterddp sets this option itself"),
        ("slurm.cpu_bind=none", "slurm.cpu_bind: an option of srun"),
    ],
)
def test_what_the_script_says_itself_is_refused(override, words):
    with pytest.raises(SpecError) as caught:
        load(override)
    problem = caught.value.problems[0]
    assert words in f"{problem.key}: {problem.message}"


@pytest.mark.parametrize(
    ("text", "tasks", "most"),
    [
        ("3", (3,), None),
        ("0-3", (0, 1, 2, 3), None),
        ("1,5-9:2%3", (1, 5, 7, 9), 3),
        ("[4-5,4]", (4, 5), None),
        ("0-1%0", (0, 1), None),
    ],
)
def test_the_tasks_of_an_array_are_those_of_sbatch(text, tasks, most):
    assert read_array(text) == (tasks, most)


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1:2", "1%x", "0-10000", "0-999999999", "1,,2"])
def test_what_is_no_array_is_refused(text):
    with pytest.raises(UsageError, match="--array="):
        read_array(text)
