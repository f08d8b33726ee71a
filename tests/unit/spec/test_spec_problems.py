"""How a wrong spec is reported: everything at once, in place, with a guess at what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.tree import format_spec_error


def error_of(text: str, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(text, overrides, environ={})
    return caught.value


def message_of(text: str) -> tuple[str, str | None]:
    (problem,) = error_of("name: x\n" + text).problems
    return f"{problem.key}: {problem.message}", problem.hint


def test_every_problem_is_shown_with_its_line_a_caret_and_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(
        "name: demo\nresources:\n  gpu_per_node: 4\n  time: 14400\n\ntrain:\n  epochs: 0\n", encoding="utf-8"
    )
    with pytest.raises(SpecError) as caught:
        load_spec("job.yaml", environ={})
    assert format_spec_error(caught.value) == (
        "error: job.yaml has 3 problems, nothing was submitted\n"
        '  --> job.yaml:3:3  resources.gpu_per_node: unknown key. Did you mean "gpus_per_node"?\n'
        "   3 |   gpu_per_node: 4\n"
        "     |   ^\n"
        "  --> job.yaml:4:9  resources.time: 14400 means 14400 minutes (10 days), as in Slurm\n"
        "   4 |   time: 14400\n"
        "     |         ^\n"
        '       hint: 14400 seconds are "4:00:00"; if you mean that, write "10-00:00"\n'
        "  --> job.yaml:7:11  train.epochs: found 0, expected at least 1\n"
        "   7 |   epochs: 0\n"
        "     |           ^"
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("epochs: 3", "epochs: unknown key here. It belongs under train:", None),
        ("nnodes: 3", "nnodes: unknown key here. It belongs under resources:", None),
        ("partition: gpu", "partition: unknown key here. It belongs under slurm:", None),
        ("train: {launcher: local}", "train.launcher: unknown key here. It belongs at the top level", None),
        ("lancher: local", 'lancher: unknown key. Did you mean "launcher"?', None),
        ("train: {learning_rate: 1}", 'train.learning_rate: unknown key. Did you mean "lr"?', None),
        ("train: {amp: on}", 'train.amp: unknown key. Did you mean "precision"?', None),
        ("learning_rate: 1", 'learning_rate: unknown key. Did you mean "train.lr"?', None),
        ("train: {batch: 1}", 'train.batch: unknown key. Did you mean "batch_size"?', None),
        ("train: {Batch-Size: 1}", 'train.Batch-Size: unknown key. Did you mean "batch_size"?', None),
        (
            "resources: {nproc-per-node: 1}",
            'resources.nproc-per-node: unknown key. Did you mean "nproc_per_node"?',
            None,
        ),
        ("ssh: {hosts: [{host: a, gpu: 3}]}", 'ssh.hosts.0.gpu: unknown key. Did you mean "gpus"?', None),
        ("train.lr: 1", "train.lr: unknown key", "write it in its section, train: {lr: ...}"),
        ("zzz: 1", "zzz: unknown key", None),
        ("zzz.zzz: 1", "zzz.zzz: unknown key", None),
    ],
)
def test_an_unknown_key_names_the_key_that_was_meant_or_its_section(text: str, message: str, hint: str | None) -> None:
    assert message_of(text) == (message, hint)


def test_a_missing_name_is_reported_with_an_example() -> None:
    (problem,) = error_of("train: {epochs: 3}\n").problems
    assert f"{problem.key}: {problem.message}" == "name: missing, expected `name: my-run`"


def test_rules_between_right_values_are_reported_beside_wrong_values() -> None:
    problems = error_of("name: x\ndevice: cpu\nnetwork: {backend: nccl}\ntrain: {epochs: 0}\nfoo: 1\n").problems
    assert [problem.key for problem in problems] == ["network.backend", "train.epochs", "foo"]


def test_rules_about_wrong_values_are_not_asked() -> None:
    problems = error_of(
        "name: x\nlauncher: ssh\nssh: {hosts: [-x]}\nresources: {nodes: 0, gpus_per_node: 2}\n"
    ).problems
    assert [problem.key for problem in problems] == ["ssh.hosts.0.host", "resources.nodes"]


def test_problems_come_in_the_order_of_the_file_and_then_of_the_command_line() -> None:
    problems = error_of("name: x\ntrain: {epochs: 0}\nfoo: 1\n", "train.lr=x", "bar=1").problems
    assert [(problem.source, problem.line) for problem in problems] == [
        ("<text>", 2),
        ("<text>", 3),
        ("bar=1 (command line)", None),
        ("train.lr=x (command line)", None),
    ]


def test_the_caret_stands_below_the_value_behind_wide_characters() -> None:
    rendered = format_spec_error(error_of('name: x\nenv: {A: "火", RANK: 1}\n')).splitlines()
    assert rendered[2] == '   2 | env: {A: "火", RANK: 1}'
    # The wide character takes two cells and one place in the text.
    assert rendered[3].index("^") == rendered[2].index("RANK") + 1


def test_nothing_from_the_file_steers_the_terminal() -> None:
    hostile = 'name: x\n"a\\e]0;title\\a": 1\nenv: {A: "\u202e", "\\e[31m": 1}\n'
    rendered = format_spec_error(error_of(hostile))
    assert "\x1b" not in rendered
    assert "\u202e" not in rendered
    assert "\\u202e" in rendered
    assert "\\x1b" in rendered or "\\u001b" in rendered


def test_a_source_name_with_control_characters_is_escaped() -> None:
    error = SpecError((Problem(source="a\x1b[2J\n.yaml", message="is empty"),))
    assert "\x1b" not in format_spec_error(error)
    assert len(format_spec_error(error).splitlines()) == 2


def test_a_long_line_is_cut_around_the_problem() -> None:
    rendered = format_spec_error(error_of("name: x\nenv: {" + "".join(f"K{i}: 1, " for i in range(2000)) + "A B: 1}\n"))
    line, caret = rendered.splitlines()[2:4]
    assert len(line) < 130
    assert line[caret.index("^") :].startswith("A B: 1")


def test_a_hundred_problems_are_cut_and_counted() -> None:
    rendered = format_spec_error(error_of("name: x\n" + "".join(f"key_{index}: 1\n" for index in range(100))))
    assert rendered.splitlines()[-1] == "  ... and 90 more"
    assert "100 problems" in rendered.splitlines()[0]


def test_a_file_full_of_unknown_keys_gets_suggestions_for_the_first_fifty() -> None:
    problems = error_of("name: x\n" + "".join(f"launcher_{index}: 1\n" for index in range(60))).problems
    assert len(problems) == 60
    assert ["Did you mean" in problem.message for problem in problems[::10]] == [True] * 5 + [False]
