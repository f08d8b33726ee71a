"""The typed spec: how values are read, what is in range, and which values do not go together."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from clusterddp.errors import SpecError
from clusterddp.spec.fields import Duration
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import EntrySpec, JobSpec, Resources
from clusterddp.spec.train import TrainSpec
from clusterddp.spec.yamlfile import resolved_yaml


def load(text: str) -> JobSpec:
    return load_spec("name: x\n" + text, environ={}).job


def problem_of(text: str) -> tuple[str, str, str | None]:
    with pytest.raises(SpecError) as caught:
        load(text)
    (problem,) = caught.value.problems
    return problem.key, problem.message, problem.hint


def test_a_name_is_enough() -> None:
    assert load("") == JobSpec(name="x", train=TrainSpec())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("5:30", 330),
        ("4:00:00", 14_400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:30:15", 131_415),
        ('"2:00:00"', 7200),
        ("1440", 86_400),
        ("100:00:00", 360_000),
    ],
)
def test_time_has_slurms_six_forms(text: str, seconds: int) -> None:
    assert load(f"resources: {{time: {text}}}").resources.time == Duration(text.strip('"'), seconds)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("14400", "14400 means 14400 minutes (10 days), as in Slurm",
         '14400 seconds are "4:00:00"; if you mean that, write "10-00:00"'),
        ("2000", "2000 means 2000 minutes (1.39 days), as in Slurm", 'if you mean that, write "1-09:20"'),
        ("UNLIMITED", 'found "UNLIMITED", expected a time', "leave time out for no limit of your own"),
        ("infinite", 'found "infinite", expected a time', "leave time out for no limit of your own"),
        ("0", "found 0, expected a time above 0 and up to 3650 days", "leave time out for no limit of your own"),
        ("2h", "found 2h, expected a time", '2h is "2:00:00"'),
        ("20s", "found 20s, expected a time", '20s is "0:00:20"'),
        ("1500min", "found 1500min, expected a time", '1500min is "1-1:00:00"'),
        ("2w", "found 2w, expected a time", 'write "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M" or minutes'),
        ("-5", "found -5, expected a time", 'write "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M" or minutes'),
        ("1:60", "found 1:60, expected minutes and seconds up to 59, and hours up to 23 behind days",
         'write "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M" or minutes'),
        ("1-24", "found 1-24, expected minutes and seconds up to 59, and hours up to 23 behind days",
         'write "H:M:S", "D-H:M:S", "M:S", "D-H", "D-H:M" or minutes'),
    ],
)  # fmt: skip
def test_other_times_are_refused_with_the_right_form(text: str, message: str, hint: str) -> None:
    assert problem_of(f"resources: {{time: {text}}}") == ("resources.time", message, hint)


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Y", "1", '"true"', "'false'"])
def test_only_true_and_false_are_booleans(word: str) -> None:
    key, message, hint = problem_of(f"train: {{nesterov: {word}}}")
    assert (key, message.endswith("expected true or false")) == ("train.nesterov", True)
    assert hint is not None
    assert hint.startswith(("write true", "write false"))


@pytest.mark.parametrize(("word", "value"), [("true", True), ("True", True), ("FALSE", False)])
def test_booleans_have_the_spellings_of_yamls_core_schema(word: str, value: bool) -> None:
    train = load(f"train: {{deterministic: {word}}}").train
    assert train is not None
    assert train.deterministic is value


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1e+3", 1e3), (".5", 0.5), ("2.", 2.0), ("+3", 3.0), ("1E-5", 1e-5)]
)
def test_floats_are_read_as_people_write_them(text: str, value: float) -> None:
    train = load(f"train: {{lr: {text}}}").train
    assert train is not None
    assert train.lr == value


@pytest.mark.parametrize(
    ("key", "text", "message", "hint"),
    [
        (
            "epochs",
            "010",
            "found 010, expected a whole number",
            "write 10; some YAML readers take a leading 0 for octal",
        ),
        ("epochs", "1_000", "found 1_000, expected a whole number", "write 1000"),
        ("epochs", "0x10", "found 0x10, expected a whole number", "write 16"),
        ("epochs", "1e3", "found 1e3, expected a whole number", "write 1000"),
        ("epochs", "8.0", "found 8.0, expected a whole number", "write 8"),
        ("epochs", "8.5", "found 8.5, expected a whole number", None),
        ("epochs", '"8"', 'found the text "8", expected a whole number', "write 8, without quotes"),
        ("epochs", "true", 'found "true", expected a whole number', None),
        ("epochs", "-1", "found -1, expected at least 1", None),
        ("epochs", "", "found an empty value, expected a whole number", None),
        ("epochs", "[1]", "found a list, expected a whole number", None),
        ("epochs", "{a: 1}", "found a mapping, expected a whole number", None),
        ("epochs", "ten", 'found "ten", expected a whole number', None),
        ("lr", ".nan", 'found ".nan", expected a finite number', None),
        ("lr", "-.inf", 'found "-.inf", expected a finite number', None),
        ("lr", "inf", 'found "inf", expected a finite number', None),
        ("lr", "1e999", "found 1e999, expected a finite number", None),
        ("lr", '"0,1"', 'found the text "0,1", expected a number', None),
        ("lr", "0,1", 'found "0,1", expected a number', "write 0.1"),
        ("lr", "010", "found 010, expected a number", "write 10"),
        ("lr", "0", "found 0, expected more than 0", None),
        ("momentum", "1", "found 1, expected less than 1", None),
        ("warmup", "1.5", "found 1.5, expected at most 1", None),
        ("model", "resnet19", 'found "resnet19", expected resnet18 or fastnet. Did you mean "resnet18"?', None),
        ("augment", "no", 'found "no", expected none, flip or flip_translate', "write none"),
        ("augment", "~", "found an empty value, expected none, flip or flip_translate", "write none"),
        ("data_dir", '""', 'found the text "", expected text that is not empty', None),
    ],
)
def test_a_wrong_value_says_what_was_found_and_expected(key: str, text: str, message: str, hint: str | None) -> None:
    assert problem_of(f"train:\n  {key}: {text}\n") == (f"train.{key}", message, hint)


def test_a_number_of_four_hundred_digits_is_refused_in_one_line() -> None:
    _, message, _ = problem_of(f"train: {{epochs: 1{'0' * 400}}}")
    assert message.endswith("expected a whole number below 2^63")
    assert len(message) < 150


def test_plain_numbers_are_text_where_text_is_expected() -> None:
    job = load("env: {THREADS: 08, ON: yes, RATE: 1e3, EMPTY: ''}\nentry: {script: 123, args: [--lr, 0.10, true]}\n")
    assert job.env == {"THREADS": "08", "ON": "yes", "RATE": "1e3", "EMPTY": ""}
    assert job.entry == EntrySpec(script="123", args=("--lr", "0.10", "true"))


def test_aliases_of_torchrun_and_slurm_are_accepted() -> None:
    assert load("resources: {nnodes: 2, nproc_per_node: 4}").resources == Resources(nodes=2, procs_per_node=4)
    assert load("resources: {ntasks_per_node: 4}").resources == Resources(procs_per_node=4)


def test_a_key_and_its_alias_together_are_refused() -> None:
    assert problem_of("resources: {nodes: 2, nnodes: 2}")[:2] == (
        "resources.nnodes",
        "sets the same as nodes in line 2",
    )


@pytest.mark.parametrize(
    ("resources", "ranks"),
    [("{}", 1), ("{gpus_per_node: 4}", 4), ("{nodes: 2, gpus_per_node: 0}", 2), ("{nodes: 2, procs_per_node: 3}", 6)],
)
def test_ranks_follow_gpus_unless_they_are_given(resources: str, ranks: int) -> None:
    assert load(f"resources: {resources}").resources.world_size == ranks


def test_slurm_options_have_both_spellings_and_keep_their_text() -> None:
    job = load("slurm: {mail-type: END, time_min: 4:00:00, exclusive: true, requeue: false, nice: 0100}")
    assert job.slurm == {
        "mail_type": "END",
        "time_min": "4:00:00",
        "exclusive": True,
        "requeue": False,
        "nice": "0100",
    }


def test_hosts_are_names_or_mappings() -> None:
    job = load('launcher: ssh\nssh: {hosts: [gpu01, "gpu[02-04]", {host: gpu09, gpus: 4}]}')
    assert [(host.host, host.gpus) for host in job.ssh.hosts] == [("gpu01", None), ("gpu[02-04]", None), ("gpu09", 4)]


@pytest.mark.parametrize("host", ['"-oProxyCommand=x"', '"a b"', '"a;b"', '"$(x)"', '""', '"a\\nb"'])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    assert problem_of(f"ssh: {{hosts: [{host}]}}")[0] == "ssh.hosts.0.host"


@pytest.mark.parametrize("name", ["..", ".a", "-rf", "a/b", "a b", "%j/x", "a\\nb", "", "é", "a" * 65, "a$"])
def test_a_name_outside_the_alphabet_is_refused(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(f'name: "{name}"\n', environ={})
    assert "1 to 64 letters" in caught.value.problems[0].message


@pytest.mark.parametrize("name", ['"123"', "123", "a.b-c_d", "a" * 64])
def test_a_name_of_digits_is_text(name: str) -> None:
    assert load_spec(f"name: {name}\n", environ={}).job.name == name.strip('"')


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_X", "CLUSTERDDP_RUN"]
)
def test_rank_variables_cannot_be_set(name: str) -> None:
    key, message, _ = problem_of(f"env: {{{name}: 1}}")
    assert (key, message) == (
        f"env.{name}",
        f"{name} is set by clusterddp for each rank; your value would break the run",
    )


def test_a_secret_written_with_its_value_is_not_repeated() -> None:
    with pytest.raises(SpecError) as caught:
        load("secrets: [WANDB_API_KEY=hunter2]")
    (problem,) = caught.value.problems
    assert "hunter2" not in f"{problem}"
    assert problem.hint == "write only the name, never its value"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("train: {}\nentry: {script: a.py}", "entry", "either train or entry"),
        ("entry: {}", "entry", "names nothing to run, expected one of script, module, function and command"),
        ("entry: {script: a.py, module: a}", "entry.module", "has script and module, expected one of"),
        ("entry: {module: a-b}", "entry.module", "expected a module's dotted name"),
        ("resources: {nodes: 60000, procs_per_node: 2}", "resources.nodes", "= 120000 ranks, expected at most 65536"),
        ("resources: {gpus_per_node: 2, procs_per_node: 4}", "resources.procs_per_node", "expected one rank per GPU"),
        ("device: cuda\nresources: {gpus_per_node: 0}", "resources.gpus_per_node", "device cuda needs GPUs"),
        ("device: cpu\nnetwork: {backend: nccl}", "network.backend", "nccl needs GPUs, and device is cpu"),
        ("resources: {gpus_per_node: 0}\nnetwork: {backend: nccl}", "network.backend", "gpus_per_node is 0"),
        ("launcher: ssh", "ssh.hosts", "launcher ssh has no hosts"),
        ("train: {sync_bn: true, model: fastnet}", "train.sync_bn", "fastnet has a batch norm of its own form"),
        ("train: {compile: always, strategy: dp}", "train.compile", "DataParallel's copies of the model"),
        ("train: {translate: 32}", "train.translate", "less than 32: the images are kept at 32x32"),
        ("train: {dataset: stl10, cutout: 96}", "train.cutout", "less than 96: the images are kept at 96x96"),
        ("train: {dataset: STL10}", "train.dataset", 'a set that the trainer knows. Did you mean "stl10"?'),
        ("train: {dataset: cifar}", "train.dataset", 'Did you mean "cifar10'),
        ("train: {dataset: sun397}", "train.dataset", "expected a set that the trainer knows"),
        ("train: {dataset: food101}", "train.image_size", "food101 has images of many sizes, and no image_size is set"),
        ("train: {dataset: folder}", "train.data_dir", "no data_dir is set"),
        ("train: {image_size: 28}", "train.image_size", "expected at least 32, the size of shapes's images"),
        ("train: {model: fastnet, dataset: stl10}", "train.model", "fastnet is for images of 32x32 pixels"),
        ("train: {model: fastnet, image_size: 224}", "train.model", "these have 224x224"),
        ("train: {momentum: 0}", "train.momentum", "nesterov needs a momentum above 0"),
        ("train: {samples: 4}", "train.samples", "at least 5 generated images"),
        ("env: {A: x}\nsecrets: [A]", "env.A", "is also under secrets"),
        ("secrets: [A, A]", "secrets.1", "A is named twice"),
        ("network: {master_port: 80}", "network.master_port", "expected auto or a port from 1024 to 65535"),
        ("network: {interface: a b}", "network.interface", "the name of an interface"),
        ('network: {heartbeat_timeout: "0:20"}', "network.heartbeat_timeout", "is shorter than host_silence, 30 s"),
        ('network: {host_silence: "0:00"}', "network.host_silence", "expected a time above 0"),
        ("restarts: 101", "restarts", "expected at most 100"),
        ("slurm: {--partition: x}", "slurm.__partition", "a long option of sbatch"),
        ('slurm: {comment: "a\\nb"}', "slurm.comment", "text without line breaks"),
        ("slurm: {gres: [a]}", "slurm.gres", "found a list, expected text"),
        ("resources: 3", "resources", "found 3, expected a mapping"),
        ("env: [A]", "env", "found a list, expected a mapping"),
        ("secrets: TOKEN", "secrets", 'found "TOKEN", expected a list'),
        ("ssh: {hosts: gpu01}", "ssh.hosts", 'found "gpu01", expected a list'),
    ],
)
def test_values_that_do_not_go_together_are_refused(text: str, key: str, words: str) -> None:
    found_key, message, _ = problem_of(text)
    assert found_key == key
    assert words in message


def test_ranks_may_share_the_gpus_that_a_cpu_run_leaves_alone() -> None:
    assert load("device: cpu\nresources: {gpus_per_node: 2, procs_per_node: 4}").resources.world_size == 4


def test_a_section_with_nothing_in_it_has_its_defaults() -> None:
    assert load("resources:\nenv:\nsecrets:\nslurm: ~\nssh:\ntrain:\n") == load("")


def test_a_key_with_nothing_behind_it_is_where_a_conflict_about_it_is_shown() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("name: x\nlauncher: ssh\nssh:\n  hosts:\n", environ={})
    (problem,) = caught.value.problems
    assert (problem.message, problem.line, problem.column) == ("launcher ssh has no hosts", 4, 9)


def test_the_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("").train.epochs = 3  # type: ignore[misc,union-attr]


@pytest.mark.parametrize("mode", ["json", "python"])
def test_a_dumped_spec_reads_back_equal(mode: Any) -> None:
    job = load("resources: {time: 30}\nssh: {hosts: [a, {host: b, gpus: 1}]}\nsecrets: [A]\nslurm: {exclusive: true}")
    assert JobSpec.model_validate(job.model_dump(mode=mode)) == job


def test_values_from_python_are_checked_like_written_ones() -> None:
    with pytest.raises(ValidationError, match="expected a whole number"):
        JobSpec.model_validate({"name": "x", "train": {"epochs": True}})
    with pytest.raises(ValidationError, match="finite"):
        JobSpec.model_validate({"name": "x", "train": {"lr": float("nan")}})
    with pytest.raises(ValidationError, match="extra_forbidden"):
        JobSpec.model_validate({"name": "x", "epochs": 3})


def test_a_host_reads_the_trainers_section_without_pydantic() -> None:
    code = (
        "import sys; from clusterddp.spec.train import TrainSpec; "
        "print(TrainSpec.from_json({'lr': 0.2}).lr, 'pydantic' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["0.2", "False"]


def test_the_model_loads_no_yaml() -> None:
    code = "import sys, clusterddp.spec.model; print([m for m in ('yaml', 'torch', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_the_resolved_spec_holds_every_value() -> None:
    lines = resolved_yaml(load("resources: {time: 4:00:00}")).splitlines()
    assert lines[0] == "name: x"
    assert '  time: "4:00:00"' in lines
    assert "  weight_decay: 0.0005" in lines
    assert not [line for line in lines if line.startswith("entry")]
