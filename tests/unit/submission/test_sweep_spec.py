"""Sweeps as they are written: which values, which variants, and what is wrong with them, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from clusterddp.errors import SpecError
from clusterddp.spec.load import load_spec
from clusterddp.spec.sweep import SweepSpec, load_sweep, variant_label
from tests.support.paths import ROOT

OF_THE_MACHINES = "it is a request for machines, which all runs of a sweep share"
TEXT = """\
name: x
train: {lr: 0.5, epochs: 3}
sweep:
  values: {train.lr: [0.1, 0.2], train.seed: [0, 1, 2]}
  throttle: 8
"""


def load(*arguments: str, text: str = "name: x\n", sweep: bool = True) -> SweepSpec:
    return load_sweep(text, arguments, sweep=sweep, environ={})


def labels(spec: SweepSpec) -> list[str]:
    return [variant.label for variant in spec.variants]


def messages(*arguments: str, text: str = "name: x\n", sweep: bool = True) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(*arguments, text=text, sweep=sweep)
    return [f"{problem.key}: {problem.message}" for problem in caught.value.problems]


def test_arguments_with_several_values_make_their_product() -> None:
    spec = load("train.lr=0.1,0.2", "train.seed=0,1")
    assert labels(spec) == ["lr=0.1 seed=0", "lr=0.1 seed=1", "lr=0.2 seed=0", "lr=0.2 seed=1"]


def test_the_section_makes_the_same_product_without_an_option() -> None:
    spec = load(text=TEXT, sweep=False)
    assert (len(spec.variants), spec.keys, spec.throttle) == (6, ("train.lr", "train.seed"), 8)


def test_a_spec_that_sweeps_nothing_has_one_variant_and_no_keys() -> None:
    spec = load("train.lr=0.1", sweep=False)
    assert (len(spec.variants), spec.keys, spec.variants[0].label) == (1, (), "")


def test_the_example_is_six_runs_two_at_a_time() -> None:
    spec = load_sweep(ROOT / "jobs/trainer/sweep_lr.yaml", sweep=False, environ={})
    assert (len(spec.variants), spec.throttle, spec.variants[-1].label) == (6, 2, "lr=0.4 seed=1")


def test_a_variant_is_the_spec_with_its_values() -> None:
    variant = load(text=TEXT).variants[4]
    alone = load_spec(TEXT, ["train.lr=0.2", "train.seed=1", "~sweep"], environ={})
    assert (variant.resolved.job, variant.values) == (alone.job, {"train.lr": 0.2, "train.seed": 1})


def test_a_swept_value_comes_from_the_sweep_and_beats_the_spec() -> None:
    changes = {
        change["key"]: (change["value"], change["origin"]) for change in load(text=TEXT).variants[-1].resolved.changes()
    }
    assert changes["train.lr"] == (0.2, "sweep")
    assert changes["train.epochs"] == (3, "<text>:2")


def test_an_argument_fixes_a_key_that_the_section_sweeps() -> None:
    spec = load("train.lr=0.7", text=TEXT, sweep=False)
    assert labels(spec) == ["seed=0", "seed=1", "seed=2"]
    assert spec.variants[0].values == {"train.seed": 0}
    assert spec.variants[0].resolved.origins["train.lr"] == "command line"


def test_an_argument_with_several_values_takes_the_place_of_the_sections() -> None:
    assert labels(load("train.seed=7,8", "sweep.throttle=1", text=TEXT))[:2] == ["lr=0.1 seed=7", "lr=0.1 seed=8"]


def test_the_section_is_dropped_like_any_other() -> None:
    assert load("~sweep", text=TEXT, sweep=False).keys == ()


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("network.backend=gloo,nccl", ["gloo", "nccl"]),
        ("entry.script=a.py,b.py", ["a.py", "b.py"]),
        ("env.LR=1,2", ["1", "2"]),
    ],
)
def test_keys_that_ask_nothing_of_machines_are_swept(argument: str, values: list[object]) -> None:
    spec = load(argument, text="name: x\nentry: {module: m}\n" if "script" not in argument else "name: x\n")
    assert [list(variant.values.values()) for variant in spec.variants] == [[value] for value in values]


def test_max_parallel_is_another_word_for_throttle() -> None:
    assert load("env.A=1,2", "sweep.max_parallel=3").throttle == 3


def test_lists_and_quoted_texts_are_single_values() -> None:
    text = "name: x\nentry: {script: a.py}\n"
    spec = load("entry.args=[--lr, 1],[--lr, 2]", "env.A='b, c',d e", text=text)
    assert [variant.values["entry.args"] for variant in spec.variants] == [["--lr", "1"]] * 2 + [["--lr", "2"]] * 2
    assert [variant.values["env.A"] for variant in spec.variants] == ["b, c", "d e"] * 2


def test_one_list_or_one_quoted_text_is_no_sweep() -> None:
    text = "name: x\nentry: {script: a.py}\n"
    spec = load("entry.args=[--lr, 1]", "env.A='b, c'", "env.B=1,2", text=text)
    assert (spec.keys, spec.variants[0].resolved.job.env["A"]) == (("env.B",), "b, c")


def test_a_swept_time_is_named_as_it_was_written() -> None:
    assert labels(load("network.start_timeout=1,0:30")) == ["start_timeout=1", "start_timeout=0:30"]


def test_a_key_that_two_sections_have_is_written_out_in_labels() -> None:
    assert variant_label({"train.seed": 1, "env.seed": "x y"}) == "train.seed=1 env.seed=x y"


def test_without_the_option_several_values_are_refused_with_its_name() -> None:
    with pytest.raises(SpecError) as caught:
        load("train.lr=0.1,0.2", sweep=False)
    assert (caught.value.problems[0].hint or "").startswith("--sweep makes a run of each")


@pytest.mark.parametrize(
    ("arguments", "text", "expected"),
    [
        (["train.lr=0.1,0.2"], "name: x\nepochs: 1\n", ["epochs: unknown key here. It belongs under train:"]),
        (["train.lr=1,1"], "name: x\n", ['train.lr: "1" is swept twice']),
        (["train.lr=1,2", "train.lr=3,4"], "name: x\n", ["train.lr: is swept twice"]),
        (["train.lr=1,"], "name: x\n", ['train.lr: found "1,", expected a value after the comma']),
        (["train.lr=1,*x"], "name: x\n", ["train.lr: cannot be read as the list [1,*x]: aliases (*x) are not allowed"]),
        (["train.lrr=1,2"], "name: x\n", ['train.lrr: unknown key. Did you mean "lr"?']),
        (["resources.nodes=1,2"], "name: x\n", [f"resources.nodes: cannot be swept: {OF_THE_MACHINES}"]),
        (["slurm.qos=a,b"], "name: x\n", [f"slurm.qos: cannot be swept: {OF_THE_MACHINES}"]),
        (["name=a,b"], "name: x\n", ["name: cannot be swept: it is one for the whole sweep"]),
        (["restarts=0,1"], "name: x\n",
         ["restarts: cannot be swept: it is one for the whole sweep: Slurm restarts all tasks of a job array "
          "or none"]),
        (["env=1,2"], "name: x\n",
         ["env: cannot be swept: it is a section; name a key of it, such as env.NAME"]),
        (["train.lr=1"], "name: x\n", ["sweep: nothing is swept: no key has several values"]),
        (["train.seed=1,2"], "name: x\nentry: {script: a}\n",
         ["train.seed: is for the built-in trainer, and this spec runs your own program"]),
        ([], "name: x\nsweep: {throttle: 2}\n", ["sweep: nothing is swept: no key has several values"]),
        ([], "name: x\nsweep: {values: {train.lr: 3}}\n",
         ["sweep.values.train.lr: found 3, expected a list of values"]),
        ([], "name: x\nsweep: {values: {train.lr: []}}\n",
         ["sweep.values.train.lr: found a list, expected a list that is not empty"]),
        ([], "name: x\nsweep: {values: {l r: [1, 2]}}\n", ["l r: expected a dotted key such as train.lr"]),
        ([], "name: x\nsweep: {train.lr: [1, 2]}\n", ["sweep.train.lr: unknown key"]),
        ([f"train.seed={','.join(map(str, range(101)))}", f"train.samples={','.join(map(str, range(5, 105)))}"],
         "name: x\n", ["sweep: 101 x 100 = 10100 runs, expected at most 10000"]),
    ],
)  # fmt: skip
def test_what_cannot_be_swept_is_named(arguments: Sequence[str], text: str, expected: list[str]) -> None:
    assert messages(*arguments, text=text, sweep=bool(arguments)) == expected


def test_every_problem_of_every_variant_is_reported_once() -> None:
    text = "name: x\nlauncher: slrum\nsweep: {values: {train.lr: [0.1, x, y], train.seed: [1, -1]}}\n"
    assert messages(text=text, sweep=False) == [
        'launcher: found "slrum", expected local, ssh or slurm. Did you mean "slurm"?',
        'train.lr: found "x", expected a number',
        'train.lr: found "y", expected a number',
        "train.seed: found -1, expected at least 0",
    ]


def test_a_conflict_between_values_names_the_variants_that_have_it() -> None:
    assert messages("train.momentum=0,0.9", "train.nesterov=true,false", "train.seed=0,1,2") == [
        "train.momentum: nesterov needs a momentum above 0 (with momentum=0 nesterov=true)"
    ]


def test_the_problem_of_a_swept_value_points_at_it() -> None:
    with pytest.raises(SpecError) as caught:
        load(text="name: x\nsweep:\n  values:\n    train.lr: [0.1, x]\n", sweep=False)
    assert [(problem.line, problem.column) for problem in caught.value.problems] == [(4, 21)]
