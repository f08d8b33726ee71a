"""Arguments of a program by their names: `entry.args.lr=0.2` sets `--lr` among `entry.args`."""

from __future__ import annotations

import pytest

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.program_arguments import named_arguments
from clusterddp.spec.sweep import load_sweep


def spec_of(args: str, *, program: str = "script: t.py") -> str:
    return f"name: x\nentry:\n  {program}\n  args: {args}\n"


def words(args: str, *overrides: str) -> list[object]:
    job = load_spec(spec_of(args), overrides, environ={}).job
    assert job.entry is not None
    return list(job.entry.args)


def problems(text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load_spec(text, overrides, environ={})
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("args", "override", "expected"),
    [
        ("[--lr, 0.1, data]", "lr=0.2", ["--lr", "0.2", "data"]),
        ("[--lr=0.1, data]", "lr=0.2", ["--lr=0.2", "data"]),
        ("[--lr, 0.1]", "lr=1e-3", ["--lr", "1e-3"]),
        ("[--lr, -0.1, --b]", "lr=0.2", ["--lr", "0.2", "--b"]),
        ("[--weight-decay, 0.1]", "weight_decay=0", ["--weight-decay", "0"]),
        ("[--weight_decay=0.1]", "weight-decay=0", ["--weight_decay=0"]),
        ("[-b, 32]", "b=64", ["-b", "64"]),
        ("[-lr, 0.1]", "lr=0.2", ["-lr", "0.2"]),
        ("[--optim.lr, 0.1]", "optim.lr=0.2", ["--optim.lr", "0.2"]),
        ("[--lr, 0.1]", "--lr=0.2", ["--lr", "0.2"]),
        ("[--lr]", "lr=0.2", ["--lr", "0.2"]),
        ("[--lr, --b, 3]", "lr=0.2", ["--lr", "0.2", "--b", "3"]),
        ("[model=resnet, lr=0.1]", "lr=0.2", ["model=resnet", "lr=0.2"]),
        ("[--layers, 1, 2, --b, 3]", "layers=[4, 5, 6]", ["--layers", "4", "5", "6", "--b", "3"]),
    ],
)
def test_the_value_of_an_option_is_replaced_in_the_form_that_is_there(
    args: str, override: str, expected: list[str]
) -> None:
    assert words(args, f"entry.args.{override}") == expected


@pytest.mark.parametrize(
    ("args", "override", "expected"),
    [
        ("[]", "lr=0.2", ["--lr", "0.2"]),
        ("", "lr=0.2", ["--lr", "0.2"]),
        ("[data, --b, 3]", "weight_decay=0.2", ["data", "--b", "3", "--weight_decay", "0.2"]),
        ("[--b, 3, --, data]", "lr=0.2", ["--b", "3", "--lr", "0.2", "--", "data"]),
        ("[]", "b=3", ["-b", "3"]),
        ("[]", "--b=3", ["--b", "3"]),
        ("[]", "shift=-0.5", ["--shift", "-0.5"]),
        ("[]", "text=-x", ["--text=-x"]),
        ("[]", "layers=[4, 5]", ["--layers", "4", "5"]),
        ("[model=resnet]", "lr=0.2", ["model=resnet", "lr=0.2"]),
    ],
)
def test_an_option_that_is_not_there_is_appended(args: str, override: str, expected: list[str]) -> None:
    assert words(args, f"entry.args.{override}") == expected


@pytest.mark.parametrize(
    ("args", "override", "expected"),
    [
        ("[--b, 3]", "amp=true", ["--b", "3", "--amp"]),
        ("[--amp, data]", "amp=true", ["--amp", "data"]),
        ("[--amp, data]", "amp=false", ["data"]),
        ("[data]", "amp=false", ["data"]),
        ("[--amp, 'on']", "amp=false", ["--amp", "false"]),
        ("[--amp=True]", "amp=False", ["--amp=False"]),
        ("[]", 'amp="true"', ["--amp", "true"]),
    ],
)
def test_true_and_false_switch_a_flag(args: str, override: str, expected: list[str]) -> None:
    assert words(args, f"entry.args.{override}") == expected


@pytest.mark.parametrize(
    ("args", "reset", "expected"),
    [
        ("[--lr, 0.1, data]", "~entry.args.lr", ["data"]),
        ("[--lr=0.1, data]", "~entry.args.lr", ["data"]),
        ("[--amp, --lr, 0.1]", "~entry.args.amp", ["--lr", "0.1"]),
        ("[data]", "~entry.args.lr", ["data"]),
    ],
)
def test_a_reset_removes_the_option_and_its_value(args: str, reset: str, expected: list[str]) -> None:
    assert words(args, reset) == expected


def test_a_position_counts_from_zero() -> None:
    assert words("[--lr, 0.1, data]", "entry.args.1=0.2", "entry.args.2=other") == ["--lr", "0.2", "other"]


def test_arguments_of_one_command_line_add_up() -> None:
    assert words("[--lr, 0.1]", "entry.args=[--b, 3]", "entry.args.lr=0.2", "entry.args.lr=0.3") == [
        "--b", "3", "--lr", "0.3",
    ]  # fmt: skip


def test_a_position_of_a_function_takes_a_value_of_any_kind() -> None:
    text = spec_of("[0.1, 3]", program="function: 'a:b'")
    job = load_spec(text, ["entry.args.0=0.2", "entry.kwargs.out=x"], environ={}).job
    assert job.entry is not None
    assert (job.entry.args, job.entry.kwargs) == ((0.2, 3), {"out": "x"})


@pytest.mark.parametrize(
    ("args", "override", "message", "hint"),
    [
        ("[a, b]", "2=c", "entry.args has no position 2: its length is 2", "entry.args.lr=0.1 sets --lr"),
        ("[]", "0=c", "entry.args has no position 0: its length is 0", "entry.args.lr=0.1 sets --lr"),
        ("[--lr, 1, --lr, 2]", "lr=3", "--lr is there 2 times", "entry.args='[...]' sets the whole list"),
        ("[--lr, 1]", "lr=", "the value is empty", "~entry.args.lr removes the option; '\"\"' is an empty text"),
        ("[--lr, 1]", "lr={a: 1}", "found a mapping, expected one value, or a list of words", None),
    ],
)
def test_what_cannot_be_set_is_an_error_that_says_what_can(
    args: str, override: str, message: str, hint: str | None
) -> None:
    (problem,) = problems(spec_of(args), f"entry.args.{override}")
    assert (problem.message, problem.hint) == (message, hint)
    assert problem.source == f"entry.args.{override} (command line)"


def test_a_function_has_no_options() -> None:
    (problem,) = problems(spec_of("[1]", program="function: 'a:b'"), "entry.args.lr=0.2")
    assert (problem.message, problem.hint) == ("a function has no option --lr", "entry.kwargs.lr=... sets its lr")


def test_kwargs_of_a_script_suggest_the_argument() -> None:
    (problem,) = problems(spec_of("[]"), "entry.kwargs.lr=0.2")
    assert problem.hint == "entry.args.lr=... sets the option --lr of a program"


def test_a_list_that_is_none_is_the_only_problem() -> None:
    (problem,) = problems(spec_of("--lr 0.1"), "entry.args.lr=0.2")
    assert (problem.message, problem.hint) == ('found "--lr 0.1", expected a list', "write [--lr, 0.1]")


def test_words_of_a_program_on_the_command_line_are_one_problem_with_the_way_to_set_them() -> None:
    (problem,) = problems(spec_of("[]"), "--lr", "0.1", "--amp", "data")
    assert problem.message == "expected key=value, found arguments of a program"
    assert problem.hint == "entry.args.lr=0.1 entry.args.amp=data sets them, or entry.args='[--lr, 0.1, --amp, data]'"


def test_a_sweep_takes_options_by_name() -> None:
    spec = load_sweep(
        spec_of("[--lr, 0.1, data]"), ["entry.args.lr=0.1,1e-3", "entry.args.amp=true,false"], sweep=True, environ={}
    )
    assert [variant.label for variant in spec.variants] == [
        "lr=0.1 amp=true", "lr=0.1 amp=false", "lr=1e-3 amp=true", "lr=1e-3 amp=false",
    ]  # fmt: skip
    args = [list(variant.resolved.job.entry.args) for variant in spec.variants if variant.resolved.job.entry]
    assert args[0] == ["--lr", "0.1", "data", "--amp"]
    assert args[3] == ["--lr", "1e-3", "data"]
    assert spec.variants[3].resolved.origins["entry.args"] == "sweep"
    assert spec.variants[3].values == {"entry.args.lr": "1e-3", "entry.args.amp": "false"}


def test_the_section_sweeps_options_positions_and_lists() -> None:
    text = spec_of("[a, 1]") + "sweep: {values: {entry.args.0: [b, c], entry.args.layers: [[1, 2], [3]]}}\n"
    spec = load_sweep(text, sweep=False, environ={})
    assert [variant.label for variant in spec.variants][::3] == [
        'args.0=b layers=["1", "2"]', 'args.0=c layers=["3"]',
    ]  # fmt: skip
    entry = spec.variants[3].resolved.job.entry
    assert entry is not None
    assert list(entry.args) == ["c", "1", "--layers", "3"]


def test_an_argument_and_the_list_that_it_is_part_of_cannot_both_be_swept() -> None:
    with pytest.raises(SpecError) as caught:
        load_sweep(spec_of("[]"), ["entry.args=[a],[b]", "entry.args.lr=1,2"], sweep=True, environ={})
    (problem,) = caught.value.problems
    assert problem.message == "is part of entry.args, which is swept, too"


def test_a_sweep_reports_a_position_that_is_not_there_once() -> None:
    with pytest.raises(SpecError) as caught:
        load_sweep(spec_of("[a]"), ["entry.args.3=0.1,0.2"], sweep=True, environ={})
    assert [problem.message for problem in caught.value.problems] == ["entry.args has no position 3: its length is 1"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--lr", "0.1", "--weight-decay=0", "--amp"], {"lr": "0.1", "weight_decay": "0", "amp": "true"}),
        (["a", "b", "--layers", "1", "2", "-b", "-1"], {"0": "a", "1": "b", "layers": "1 2", "b": "-1"}),
        (["model=resnet", "+lr=0.1"], {"model": "resnet", "lr": "0.1"}),
        (["--lr", "0.1", "--", "x", "--y"], {"lr": "0.1", "--": "x --y"}),
        (["--path", "a", "--path", "b"], None),
    ],
)
def test_arguments_are_read_by_the_keys_that_set_them(words: list[str], named: dict[str, str] | None) -> None:
    assert named_arguments(words) == named
