"""Values from beside the spec: arguments, variables, options, profiles; who wins, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from clusterddp.errors import SpecError
from clusterddp.spec.layers import config_path
from clusterddp.spec.load import ResolvedSpec, load_spec
from clusterddp.spec.train import TrainSpec

NO_ASSIGNMENT = "expected key=value, for example train.lr=0.2, or ~key for the default"


def load(
    *overrides: str, text: str = "name: x\n", environ: Mapping[str, str] | None = None, **flags: str
) -> ResolvedSpec:
    return load_spec(text, overrides, environ=environ or {}, flags=flags)


def train(resolved: ResolvedSpec) -> TrainSpec:
    assert resolved.job.train is not None
    return resolved.job.train


def messages(*overrides: str, text: str = "name: x\n", environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(*overrides, text=text, environ=environ)
    return [f"{problem.source} | {problem.key}: {problem.message}" for problem in caught.value.problems]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_an_argument_sets_a_value_by_the_rules_of_the_spec() -> None:
    resolved = load("train.lr=1e-3", "resources.time=4:00:00", "train.deterministic=true", "train.max_steps=null")
    assert (train(resolved).lr, train(resolved).deterministic, train(resolved).max_steps) == (1e-3, True, None)
    assert resolved.job.resources.time is not None
    assert resolved.job.resources.time.seconds == 14_400


def test_lists_mappings_and_quotes_are_yaml() -> None:
    resolved = load("ssh.hosts=[a, {host: b, gpus: 2}]", "env={A: 1, B: '2'}", 'env.C="x, y\\n"', "slurm.gres='a:3,b'")
    assert [host.host for host in resolved.job.ssh.hosts] == ["a", "b"]
    assert resolved.job.env == {"A": "1", "B": "2", "C": "x, y\n"}
    assert resolved.job.slurm == {"gres": "a:3,b"}


@pytest.mark.parametrize("value", ["{output_dir}", "{output_dir}/ckpt", "{{name}}", "{rank}:{world_size}"])
def test_a_value_that_begins_with_a_placeholder_is_a_text(value: str) -> None:
    entry = load(f"entry.args.out={value}", text="name: x\nentry: {script: a.py}\n").job.entry
    assert entry is not None
    assert list(entry.args) == ["--out", value]


@pytest.mark.parametrize("value", ["a: b # c", "*x", "&x", "!x", "@x", "%j", "- x", "x y ", " x", "#", "`id`", "a=b"])
def test_any_other_value_is_one_text_byte_for_byte(value: str) -> None:
    assert load(f"env.A={value}").job.env == {"A": value}


def test_plus_sets_and_tilde_goes_back_to_the_default() -> None:
    text = "name: x\ntrain: {lr: 0.5}\nenv: {A: 1, B: 2}\n"
    resolved = load("+env.C=3", "~train.lr", "~env.A", text=text)
    assert (train(resolved).lr, resolved.job.env) == (0.1, {"B": "2", "C": "3"})
    assert "train.lr" not in resolved.origins


def test_tilde_drops_a_whole_section() -> None:
    resolved = load("~train", "entry.script=a.py", text="name: x\ntrain: {epochs: 3}\n")
    assert resolved.job.train is None
    assert resolved.job.entry is not None


def test_the_last_argument_wins() -> None:
    assert train(load("train.lr=1", "~train.lr", "train.lr=2", "train.lr=3")).lr == 3


def test_an_alias_overrides_the_key_it_stands_for() -> None:
    assert load("resources.nnodes=4", text="name: x\nresources: {nodes: 2}\n").job.resources.nodes == 4
    assert load("~resources.nnodes", text="name: x\nresources: {nodes: 2}\n").job.resources.nodes == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.lrr=1", 'train.lrr=1 (command line) | train.lrr: unknown key. Did you mean "lr"?'),
        ("epochs=1", "epochs=1 (command line) | epochs: unknown key here. It belongs under train:"),
        ("~train.lrr", '~train.lrr (command line) | train.lrr: unknown key. Did you mean "lr"?'),
        ("~train.lr=1", "~train.lr=1 (command line) | : a key is reset without a value"),
        ("train.lr", f"train.lr (command line) | : {NO_ASSIGNMENT}"),
        ("=1", f"=1 (command line) | : {NO_ASSIGNMENT}"),
        ("--lr=1", "--lr=1 (command line) | : expected key=value, found arguments of a program"),
        ("train.lr=x", 'train.lr=x (command line) | train.lr: found "x", expected a number'),
        ("train.lr.x=1", "train.lr.x=1 (command line) | train.lr: found a mapping, expected a number"),
        ("train.lr=[1", "train.lr=[1 (command line) | train.lr: cannot be read as YAML: a list is opened with [ and "
         "never closed"),
        ("train.lr=1,2", 'train.lr=1,2 (command line) | train.lr: found several values, "1,2", expected one'),
        ("env.A=", "env.A= (command line) | env.A: found an empty value, expected text"),
        ("env.A=x\0", "env.A=x\0 (command line) | env.A: found \"x\\u0000\", expected text without NUL characters"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(argument: str, message: str) -> None:
    assert messages(argument) == [message]


def test_a_key_nested_deeper_than_any_spec_is_refused() -> None:
    assert messages("env" + ".v" * 5000 + "=1")[0].endswith(NO_ASSIGNMENT)


def test_precedence_is_command_line_then_spec_then_profile(config: Path) -> None:
    config.write_text("profiles: {lab: {train: {lr: 1, epochs: 1, seed: 1, width: 2}, launcher: slurm}}\n")
    environ = {"CLUSTERDDP_CONFIG": str(config)}
    resolved = load_spec(
        "name: x\ntrain: {lr: 2, epochs: 2, seed: 2}\n",
        ["train.lr=4", "launcher=ssh"],
        profile="lab",
        environ=environ,
        flags={"launcher": "local", "device": "cpu"},
    )
    trainer = train(resolved)
    assert (trainer.lr, trainer.epochs, trainer.seed, trainer.width) == (4, 2, 2, 2)
    assert resolved.job.launcher == "local"
    assert resolved.origins == {
        "name": "<text>:1",
        "device": "--cpu",
        "train.lr": "command line",
        "train.epochs": "<text>:2",
        "train.seed": "<text>:2",
        "train.width": "profile lab",
    }


def test_an_option_is_named_as_it_was_typed() -> None:
    resolved = load(text="name: x\nssh: {hosts: [a]}\n", launcher="ssh")
    assert resolved.origins["launcher"] == "--launcher"


def test_origins_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: x\ntrain:\n  lr: 0.2\n  momentum: 0.9\nenv: {A: 1}\n")
    resolved = load_spec(path, environ={})
    assert resolved.origins == {"name": f"{path}:1", "train.lr": f"{path}:3", "env.A": f"{path}:5"}
    assert (resolved.path, resolved.text) == (path, path.read_text())


def test_changes_list_values_beside_their_defaults() -> None:
    resolved = load("train.lr=0.2", "train.epochs=10")
    assert resolved.changes() == (
        {"key": "name", "value": "x", "default": None, "origin": "<text>:1", "file": None},
        {"key": "train.lr", "value": 0.2, "default": 0.1, "origin": "command line", "file": None},
    )


def test_a_default_profile_is_used_unless_another_is_asked_for(config: Path) -> None:
    config.write_text("profiles: {lab: {restarts: 1}, home: {restarts: 2}}\ndefault_profile: lab\n")
    environ = {"CLUSTERDDP_CONFIG": str(config)}
    assert load_spec("name: x\n", environ=environ).job.restarts == 1
    assert load_spec("name: x\n", environ=environ, profile="home").job.restarts == 2


def test_a_section_without_content_leaves_the_profiles_values(config: Path) -> None:
    config.write_text("profiles: {lab: {slurm: {partition: gpu}, resources: {nodes: 2}}}\n")
    environ = {"CLUSTERDDP_CONFIG": str(config)}
    kept = load_spec("name: x\nslurm:\nresources: {gpus_per_node: 1}\n", environ=environ, profile="lab").job
    assert (kept.slurm, kept.resources.nodes, kept.resources.gpus_per_node) == ({"partition": "gpu"}, 2, 1)
    dropped = load_spec("name: x\nslurm: null\n", environ=environ, profile="lab").job
    assert dropped.slurm == {}


def test_an_unknown_profile_is_answered_with_the_list(config: Path) -> None:
    config.write_text("profiles: {lab: {}, home: {}}\n")
    with pytest.raises(SpecError) as caught:
        load_spec("name: x\n", environ={"CLUSTERDDP_CONFIG": str(config)}, profile="lob")
    (problem,) = caught.value.problems
    assert problem.source == "--profile lob"
    assert problem.message == f'no profile "lob"; there are: home, lab ({config}). Did you mean "lab"?'


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("profiles: {lab: {restart: 1}}\n", (1, 18), 'unknown key. Did you mean "restarts"?'),
        ("profiles:\n  lab:\n    restarts: x\n", (3, 15), 'found "x", expected a whole number'),
        ("profile: {}\n", (1, 1), 'unknown key. Did you mean "profiles"?'),
        ("profiles: [a]\n", (1, 1), "found a list, expected a mapping of names to profiles"),
        ("profiles: {lab: 3}\n", (1, 17), "found 3, expected keys and values of a spec"),
        ("default_profile: [a]\n", (1, 1), "expected the name of a profile"),
        ("profiles: {lab: {}}\ndefault_profile: lob\nprofiles: {}\n", (3, 1), "duplicate key"),
    ],
)
def test_a_problem_in_the_configuration_has_its_own_place(
    config: Path, text: str, place: tuple[int, int], words: str
) -> None:
    config.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec("name: x\n", environ={"CLUSTERDDP_CONFIG": str(config)}, profile="lab")
    (problem,) = caught.value.problems
    assert (problem.source, problem.line, problem.column) == (str(config), *place)
    assert words in problem.message


def test_a_default_profile_that_does_not_exist_is_pointed_at(config: Path) -> None:
    config.write_text("profiles: {lab: {}}\ndefault_profile: home\n")
    with pytest.raises(SpecError) as caught:
        load_spec("name: x\n", environ={"CLUSTERDDP_CONFIG": str(config)})
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 18)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "profiles:\n", "profiles: {lab: }\ndefault_profile: lab\n"])
def test_a_configuration_with_nothing_in_it_changes_nothing(config: Path, text: str) -> None:
    config.write_text(text)
    assert load_spec("name: x\n", environ={"CLUSTERDDP_CONFIG": str(config)}).job.restarts == 0


def test_the_configuration_lies_where_the_variable_says_or_in_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "clusterddp" / "config.yaml"
    assert config_path({"CLUSTERDDP_CONFIG": "a.yaml", "HOME": "/h"}) == Path("a.yaml")
    assert config_path({"CLUSTERDDP_CONFIG": "", "HOME": "/h"}) is None
    assert config_path({}) is None


def test_a_configuration_named_by_the_variable_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml"):
        load_spec("name: x\n", environ={"CLUSTERDDP_CONFIG": str(tmp_path / "none.yaml")})
