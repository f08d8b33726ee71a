"""What holds for every spec: it is read, or refused with problems in words, and reads back as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterddp.errors import SpecError
from clusterddp.ranks.environment import find_placeholders
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec
from clusterddp.spec.tree import decode, format_spec_error
from clusterddp.spec.yamlfile import parse, resolved_yaml

bounded = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# In the manner of the Big List of Naughty Strings: what shells, terminals, YAML and Python make something else of.
NASTY = [
    "", " ", "  x  ", "a\nb", "a\r\nb", "\t", "a\tb", "#", "# x", "a # b", "a: b", "a:", ": a", "- a", "?", "? a", "-",
    "--", "---", "...", "|", ">", "|-", "&a", "*a", "!a", "!!str x", "@a", "`a`", "%j", "%YAML 1.2", "{a}", "{", "}",
    "[", "]", "[a", "{a: b", ",", "a,b", "'", '"', "''", '""', "'\"", "\\", "\\n", "\\x00", "$(touch canary)",
    "`touch canary`", "; touch canary", "| touch canary", "&& touch canary", "$HOME", "${HOME}", "~", "~root", "null",
    "Null", "true", "no", "on", "y", "0", "010", "0x1F", "1e3", "1_000", ".5", "1:30:00", "2026-11-21", ".nan", ".inf",
    "-.inf", "<<", "=", "nan", "é", "\u0451", "火", "\U0001d4b3", "\U0001f469\u200d\U0001f467", "e\u0301", "\u202eabc",
    "\u200b", "\u2028", "\u2029", "\u0085", "\ufeff", "\ufffe", "\x01", "\x07", "\x1b[31m", "\x7f", "\x9b", "\u00a0",
    "\u3000", "<script>alert(1)</script>", "' OR 1=1 --", "../../etc/passwd", "/dev/null", "-rf", "--help",
    "{init_method}", "{{x}}", "%s%n", "a" * 5000, "\u0301" * 50, "\U0010ffff", "\U0001f4a9",
]  # fmt: skip

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40) | st.sampled_from(NASTY)
filled = words.filter(bool)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
variables = st.from_regex(r"USER_[A-Za-z0-9_]{0,20}", fullmatch=True)
options = words.filter(lambda text: all(char >= " " and char != "\x7f" for char in text)) | st.booleans()
lines = words.filter(lambda text: text and text[0] != "-" and all(char >= " " and char != "\x7f" for char in text))
counts = st.integers(1, 2**31 - 1)
times = st.sampled_from(["30", "5:30", "4:00:00", "1-12", "1-12:30", "1-12:30:15"])


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


train = section(
    model=st.sampled_from(["resnet18", "fastnet"]),
    dataset=st.sampled_from(["shapes", "cifar10", "fashion_mnist", "random", "cifar100", "svhn"]),
    data_dir=optional(filled),
    download=st.booleans(),
    samples=optional(st.integers(5, 10**6)),
    epochs=counts,
    max_steps=optional(counts),
    seed=st.integers(0, 2**32 - 1),
    lr=st.floats(1e-300, 1e6),
    warmup=st.floats(0, 1),
    momentum=st.floats(0.001, 0.999),
    weight_decay=st.floats(0, 1e6),
    augment=st.sampled_from(["none", "flip", "flip_translate"]),
)
# Unknown placeholders are refused.
arguments = words.filter(lambda text: set(find_placeholders(text)) <= {"rank", "init_method"})
data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | arguments,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
entry = st.one_of(
    st.fixed_dictionaries({"script": filled}, optional={"args": st.lists(arguments, max_size=5)}),
    st.fixed_dictionaries(
        {"module": st.sampled_from(["a", "a.b_c"])}, optional={"args": st.lists(arguments, max_size=5)}
    ),
    st.fixed_dictionaries(
        {"function": st.sampled_from(["a.b:c", "/x y/é.py:c.d"])},
        optional={"args": st.lists(data, max_size=4), "kwargs": st.dictionaries(st.just("lr"), data)},
    ),
    st.fixed_dictionaries({"command": st.lists(arguments.filter(bool), min_size=1, max_size=4)}),
)
specs = st.builds(
    lambda base, program: base | program,
    st.fixed_dictionaries(
        {"name": names},
        optional={
            "launcher": st.sampled_from(["local", "slurm"]),
            "resources": section(
                nodes=st.integers(1, 256),
                procs_per_node=optional(st.integers(1, 8)),
                gpus_per_node=optional(st.integers(8, 128)),
                cpus_per_task=optional(st.integers(1, 4096)),
                memory_gb=optional(st.floats(0.001, 1e6)),
                time=optional(times),
            ),
            "network": section(master_port=st.just("auto") | st.integers(1024, 65535), interface=st.just("eth0.1:2")),
            "python": optional(lines),
            "env": st.dictionaries(variables, words, max_size=5),
            "secrets": st.lists(st.from_regex(r"TOKEN_[A-Z]{0,5}", fullmatch=True), max_size=3, unique=True),
            "restarts": st.integers(0, 100),
            "snapshot": st.booleans(),
            "slurm": st.dictionaries(st.from_regex(r"site_[a-z0-9_]{0,12}", fullmatch=True), options, max_size=5),
            "ssh": section(
                hosts=st.lists(
                    st.sampled_from(["a", "gpu[01-04]", {"host": "b", "gpus": 2}, {"host": "c", "venv": "~/v é"}]),
                    max_size=4,
                    unique_by=str,
                ),
                modules=st.lists(st.sampled_from(["cuda/12.4", "GCC"]), max_size=2),
                dir=st.sampled_from(["~/.clusterddp", "/scratch/me/my runs"]),
                send=st.dictionaries(lines, st.just("~/data"), max_size=1),
                fetch=st.lists(st.sampled_from(["logs", "metrics", "checkpoints"]), unique=True),
            ),
        },
    ),
    st.one_of(
        st.just({}), st.builds(lambda part: {"train": part}, train), st.builds(lambda part: {"entry": part}, entry)
    ),
)


def read(data: bytes) -> JobSpec | None:
    """Read a spec as from a file; None when it is refused, with problems that can be shown."""
    try:
        return load_spec(decode(data, "job.yaml") + "\n", environ={}).job
    except SpecError as error:
        check_report(error)
        return None


def check_report(error: SpecError) -> None:
    assert error.problems
    assert all("\n" not in problem.message for problem in error.problems)
    assert not [problem for problem in error.problems if "something else" in problem.message]
    assert all(line.isprintable() for line in format_spec_error(error).split("\n"))


@bounded
@given(specs)
def test_a_resolved_spec_reads_back_equal(data: dict[str, Any]) -> None:
    job = JobSpec.model_validate(data)
    text = resolved_yaml(job)
    assert read(text.encode()) == job


@bounded
@given(specs)
def test_a_spec_written_as_json_reads_as_the_same_job(data: dict[str, Any]) -> None:
    # What json.dumps escapes, pairs of surrogates aside, YAML reads the same way.
    text = json.dumps(JobSpec.model_validate(data).model_dump(mode="json"), ensure_ascii=False)
    assert read(text.encode()) in (JobSpec.model_validate(data), None)


@bounded
@given(specs, st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=4), st.integers(0, 8)), max_size=6))
def test_a_mutated_file_is_read_or_refused(data: dict[str, Any], changes: list[tuple[int, bytes, int]]) -> None:
    content = resolved_yaml(JobSpec.model_validate(data)).encode()
    for position, inserted, removed in changes:
        at = position % (len(content) + 1)
        content = content[:at] + inserted + content[at + removed :]
    read(content)


YAML_PIECES = st.sampled_from(
    ["a", "name", "train", "lr", "env", ":", ": ", "- ", "-", "\n", "\n  ", "\n ", " ", "\t", "[", "]", "{", "}", ",",
     "'", '"', "|", ">", "&a", "*a", "!", "!!int", "<<", "?", "? ", "#", "%", "---\n", "...\n", "1", "0.5", "null",
     "\\", "\\u", "\r\n", "\r", "é", "\ufeff", "\u2028"]
)  # fmt: skip


@bounded
@given(st.lists(YAML_PIECES, max_size=60).map("".join))
def test_any_heap_of_yaml_is_read_or_refused(text: str) -> None:
    try:
        parse(decode(text.encode(), "job.yaml"), "job.yaml")
    except SpecError as error:
        check_report(error)
    read(text.encode())


@bounded
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read(data)


def _retype(value: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, True, -1, 0, 10**400, 1.5, "", "x", [], ["x"], {}, {"x": 1}, [[[]]], value])


@bounded
@given(specs, st.data())
def test_values_of_other_types_are_read_or_refused(data: dict[str, Any], choices: st.DataObject) -> None:
    key = choices.draw(st.sampled_from(sorted(data)))
    if isinstance(data[key], dict) and data[key]:
        inner = choices.draw(st.sampled_from(sorted(data[key])))
        data[key] |= {inner: choices.draw(_retype(data[key][inner]))}
    else:
        data[key] = choices.draw(_retype(data[key]))
    read(json.dumps(data, ensure_ascii=False).encode())


@bounded
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_argument_is_applied_or_refused(argument: str) -> None:
    for text in (argument, f"train.lr={argument}", f"env.A={argument}", f"~{argument}"):
        try:
            load_spec("name: x\n", [text], environ={})
        except SpecError as error:
            check_report(error)


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_nasty_text_arrives_byte_for_byte_or_is_refused(text: str) -> None:
    written = json.dumps(text)  # with pairs of surrogates as \\u escapes, which are refused
    spec = (
        f"name: x\nenv: {{A: {written}}}\nentry: {{script: a.py, args: [{written}]}}\nslurm: {{comment: {written}}}\n"
    )
    job = read(spec.encode())
    if job is not None:
        assert job.entry is not None
        assert (job.env["A"], job.entry.args, job.slurm["comment"]) == (text, (text,), text)
    from_argument = load_spec("name: x\n", [f"env.A={json.dumps(text)}"], environ={}) if text.isascii() else None
    assert from_argument is None or from_argument.job.env == {"A": text}


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_nasty_names_are_refused_unless_the_alphabet_has_them(text: str) -> None:
    job = read(f"name: {json.dumps(text)}\n".encode())
    if job is not None:
        assert job.name == text
        assert text.isascii()
        assert len(text) <= 64
        assert text[0].isalnum()


def test_a_key_that_is_longer_than_yaml_looks_for_its_colon_is_written_so_that_it_can_be_read() -> None:
    long = "a" * 300
    data = {"name": "x", "ssh": {"hosts": ["a"], "send": {long: "~/x"}}, "env": {"B" * 200: "1"}}
    job = JobSpec.model_validate(data)
    assert load_spec(resolved_yaml(job), environ={}).job == job
