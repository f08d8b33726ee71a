"""Keys of earlier versions: refused with what to use instead, and dropped from the spec that a run has stored."""

from __future__ import annotations

import pytest

from clusterddp.errors import SpecError
from clusterddp.spec.load import load_spec

KEYS = [
    ("start: torchrun", "start", "owns_ranks: true"),
    ("ssh: {when_busy: wait}", "ssh.when_busy", "as a sweep"),
    ("notify: {command: a, shell: true}", "notify.shell", "[sh, -c"),
    ("notify: {command: a, mail: ada}", "notify.mail", "slurm: {mail_user: ADDRESS"),
    ("keep: 30d", "keep", "rm --older-than 30d"),
    ("train: {comm_allow: [bf16]}", "train.comm_allow", "train.comm: local:8"),
    ("entry: {script: a.py, local_rank_arg: true}", "entry.local_rank_arg", "--local_rank={local_rank}"),
    ("ssh: {python: /opt/py}", "ssh.python", "python: at the top level"),
    ("ssh: {venv: ~/v}", "ssh.venv", "venv: at the top level"),
    ("ssh: {conda: lab}", "ssh.conda", "conda: at the top level"),
    ("container: {image: a, python: p}", "container.python", "in a container it is looked for inside"),
]
"""A line of a spec, the key in it, and words of the hint."""
VALUES = [
    ("train: {comm: powersgd:4}", "train.comm", "expected exact, bf16 or local:H"),
    ("train: {dataset: imagenet}", "train.dataset", "for your own script, or for dataset: folder"),
]
"""A line of a spec, the key whose value is gone, and words of the error."""


@pytest.mark.parametrize(("line", "key", "words"), KEYS, ids=[key for _, key, _ in KEYS])
def test_a_removed_key_is_refused_with_what_to_use_instead(line: str, key: str, words: str) -> None:
    with pytest.raises(SpecError) as raised:
        load_spec(f"name: a\n{line}\n", environ={})
    (problem,) = raised.value.problems
    assert (problem.key, problem.message) == (key, "this key was removed")
    assert words in f"{problem.message}; {problem.hint}"


@pytest.mark.parametrize(("line", "key", "words"), KEYS, ids=[key for _, key, _ in KEYS])
def test_a_run_s_own_spec_may_have_a_removed_key(line: str, key: str, words: str) -> None:
    assert load_spec(f"name: a\n{line}\n", environ={}, whole=True).job.name == "a"


@pytest.mark.parametrize(("line", "key", "words"), VALUES, ids=[line for line, _, _ in VALUES])
def test_a_removed_value_is_refused_with_what_to_use_instead(line: str, key: str, words: str) -> None:
    with pytest.raises(SpecError) as raised:
        load_spec(f"name: a\n{line}\n", environ={})
    (problem,) = raised.value.problems
    assert (problem.key, problem.message.startswith("found ")) == (key, True)
    assert words in f"{problem.message}; {problem.hint}"
