"""Hosts: in the ssh section, in hostfiles, on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterddp.errors import Problem, SpecError
from clusterddp.network.hostlist import expand
from clusterddp.spec.hosts import expand_hosts, parse_hosts, read_hostfile, share_out
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec
from clusterddp.spec.tree import format_spec_error
from clusterddp.spec.yamlfile import resolved_yaml

SSH = "name: x\nlauncher: ssh\n"


def load(more: str = "", *arguments: str) -> JobSpec:
    return load_spec(SSH + more, arguments, environ={}).job


def problem_of(more: str, *arguments: str) -> Problem:
    with pytest.raises(SpecError) as caught:
        load(more, *arguments)
    (problem,) = caught.value.problems
    return problem


def from_file(path: Path, text: str, more: str = "") -> JobSpec:
    path.write_text(text)
    return load_spec(SSH + more, environ={}, hosts=read_hostfile(path)).job


def problems_of_file(path: Path, text: str) -> list[tuple[int | None, int | None, str, str | None]]:
    with pytest.raises(SpecError) as caught:
        from_file(path, text)
    return [(found.line, found.column, found.message, found.hint) for found in caught.value.problems]


def names(job: JobSpec) -> list[tuple[str, int | None]]:
    return [(host.host, host.gpus) for _, host in expand_hosts(job.ssh.hosts)]


def shares(more: str) -> list[tuple[str, int, int]]:
    return [(share.host.host, share.ranks, share.gpus) for share in share_out(load(more))]


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def test_sets_are_expanded_in_the_order_written() -> None:
    job = load('ssh: {hosts: [z, "gpu[03,01-02]", {host: "a,b", slots: 2}]}')
    assert names(job) == [
        ("z", None), ("gpu03", None), ("gpu01", None), ("gpu02", None), ("a", 2), ("b", 2),
    ]  # fmt: skip


def test_there_is_a_node_for_each_host_unless_the_spec_says_how_many() -> None:
    hosts = 'ssh: {hosts: [a, "b[1-3]"]}\n'
    assert load(hosts).resources.nodes == 4
    assert load(hosts + "resources: {nnodes: 2}").resources.nodes == 2
    assert load_spec(f"name: x\n{hosts}", environ={}).job.resources.nodes == 1


def test_the_plan_says_where_the_number_of_nodes_comes_from() -> None:
    changes = {change["key"]: change for change in load_spec(SSH + "ssh: {hosts: [a, b]}\n", environ={}).changes()}
    assert (changes["resources.nodes"]["value"], changes["resources.nodes"]["origin"]) == (2, "the number of hosts")


def test_hosts_without_gpus_of_their_own_have_those_of_the_spec() -> None:
    text = "ssh: {hosts: [a, {host: b, gpus: 4}]}\nresources: {gpus_per_node: 8}\n"
    assert shares(text) == [("a", 8, 8), ("b", 4, 4)]


def test_slots_are_gpus_and_on_the_cpu_ranks() -> None:
    text = "ssh: {hosts: [a, {host: b, slots: 4}]}\n"
    assert shares(text) == [("a", 1, 1), ("b", 4, 4)]
    assert shares(text + "device: cpu\n") == [("a", 1, 0), ("b", 4, 0)]
    assert shares(text + "resources: {gpus_per_node: 0}\n") == [("a", 1, 0), ("b", 4, 0)]


def test_a_spec_that_names_no_gpus_has_ranks_on_the_cpu() -> None:
    assert shares("ssh: {hosts: [a]}\nresources: {procs_per_node: 3}\n") == [("a", 3, 0)]
    assert shares("ssh: {hosts: [a]}\nresources: {procs_per_node: 3}\ndevice: cuda\n") == [("a", 3, 3)]


def test_only_the_first_hosts_get_a_share_when_there_are_more_than_nodes() -> None:
    assert shares("ssh: {hosts: [a, b, c]}\nresources: {nodes: 2}\n") == [("a", 1, 0), ("b", 1, 0)]


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ("ssh: {hosts: [a, b]}\nresources: {nodes: 3}", "ssh.hosts", "2 hosts for 3 nodes"),
        ("ssh: {hosts: [a, b, a]}", "ssh.hosts.2", "a is named twice"),
        ('ssh: {hosts: [gpu02, "gpu[01-03]"]}', "ssh.hosts.1", "gpu02 is named twice"),
        ('ssh: {hosts: ["g[1-3]", "g[1-4]"]}', "ssh.hosts.1", "g1 is named twice, and so are 2 more"),
        ("ssh: {hosts: ['gpu[1-']}", "ssh.hosts.0.host", "a ']' is missing"),
        ("ssh: {hosts: ['gpu[9-1]']}", "ssh.hosts.0.host", "runs backwards"),
        ("ssh: {hosts: ['a,-oProxyCommand']}", "ssh.hosts.0.host", "'-oProxyCommand' is not a host"),
        ("ssh: {hosts: ['a@-b']}", "ssh.hosts.0.host", "'a@-b' is not a host"),
        ("ssh: {hosts: ['gpu01:4']}", "ssh.hosts.0.host", "expected a host without a number behind it"),
        ("ssh: {hosts: [{gpus: 4}]}", "ssh.hosts.0.host", "missing"),
        ("ssh: {hosts: [{host: a, gpus: 1, slots: 2}]}", "ssh.hosts.0.slots", "sets the same as gpus"),
        ("ssh: {hosts: [a], venv: ~/v}", "ssh.venv", "this key was removed"),
        ("ssh: {hosts: [a]}\nvenv: ~/v\nconda: e", "conda", "venv and conda, expected one of them"),
        ("ssh: {hosts: [a]}\nvenv: v", "venv", "a path on the hosts, from / or ~/"),
        ("ssh: {hosts: [{host: a, venv: ~/v, conda: e}]}", "ssh.hosts.0.conda", "both venv and conda"),
        ('ssh: {hosts: [a]}\npython: "py\\nthon"', "python", "without line breaks"),
        ('ssh: {hosts: [{host: a, venv: "a\\tb"}]}', "ssh.hosts.0.venv", "without line breaks"),
        ('ssh: {hosts: [a]}\nconda: "a\\x7fb"', "conda", "without line breaks"),
        ('ssh: {hosts: [a], modules: ["cuda\\nrm"]}', "ssh.modules.0", "the name of a module"),
        ('ssh: {hosts: [a], modules: ["cuda gcc"]}', "ssh.modules.0", "the name of a module"),
        ("ssh: {hosts: [a]}\npython: -c", "python", "does not begin with -"),
        ("ssh: {hosts: [a], dir: runs}", "ssh.dir", "a path on the hosts, from / or ~/"),
        ('ssh: {hosts: [a], dir: "~/"}', "ssh.dir", "a path on the hosts"),
        ('ssh: {hosts: [a], dir: "/a\\nb"}', "ssh.dir", "without line breaks"),
        ("ssh: {hosts: [a], send: {data: ../data}}", "ssh.send.data", "a path on the hosts, from / or ~/"),
        ('ssh: {hosts: [a], send: {"da\\nta": ~/data}}', "ssh.send.da\nta", "without line breaks"),
        ("ssh: {hosts: [a], send: {b: ~/d, c: ~/d/e}}", "ssh.send.c", "is or holds another's place"),
        ("ssh: {hosts: [a], fetch: [weights]}", "ssh.fetch.0", "expected logs, metrics or checkpoints"),
        ("ssh: {hosts: [a], fetch: logs}", "ssh.fetch", "expected all, none, or a list"),
        ("ssh: {hosts: [{host: a, host_key: 'SHA256:x'}]}", "ssh.hosts.0.host_key", "43 characters"),
        ("ssh: {hosts: [{host: a, gpus: 0}, b]}\nresources: {gpus_per_node: 2}", "ssh.hosts", "a has no GPUs"),
        ('ssh: {hosts: ["n[1-600]"]}\nresources: {gpus_per_node: 120}', "ssh.hosts", "72000 ranks"),
        ("ssh: {hosts: [a]}\ntrain: {data_dir: data}", "train.data_dir", "a path on the hosts, from / or ~/"),
    ],
)
def test_what_cannot_be_is_refused_at_its_place(more: str, key: str, words: str) -> None:
    problem = problem_of(more)
    assert problem.key == key
    assert words in problem.message


@pytest.mark.parametrize(
    "key", ["SHA256:" + "a" * 43, "SHA256:" + "b/+A" * 10 + "abc=", "ssh-ed25519 AAAAC3NzaC1lZDI1"]
)
def test_a_host_key_is_a_fingerprint_or_a_public_key(key: str) -> None:
    assert load(f"ssh: {{hosts: [{{host: a, host_key: '{key}'}}]}}").ssh.hosts[0].host_key == key


@pytest.mark.parametrize("host", ["gpu01", "ana@gpu01.lab.example", "10.0.0.1", "fe80::1", "::1", "a_b-c.d"])
def test_what_ssh_takes_for_a_host_is_one(host: str) -> None:
    assert names(load(f"ssh: {{hosts: ['{host}']}}")) == [(host, None)]


def test_all_and_none_stand_for_lists_of_what_is_copied_back() -> None:
    assert load("ssh: {hosts: [a], fetch: all}").ssh.fetch == ("logs", "metrics", "checkpoints")
    assert load("ssh: {hosts: [a], fetch: none}").ssh.fetch == ()
    assert load("ssh: {hosts: [a], fetch: [logs, logs]}").ssh.fetch == ("logs",)


def test_a_launcher_without_hosts_names_every_way_to_give_them() -> None:
    problem = problem_of("")
    assert problem.message == "launcher ssh has no hosts"
    assert "--hosts gpu01,gpu02 or --hostfile FILE" in str(problem.hint)
    assert "ssh: {hosts: [gpu01, gpu02]}" in str(problem.hint)


def test_the_resolved_spec_says_of_a_host_what_was_said() -> None:
    text = resolved_yaml(load("ssh: {hosts: [a, {host: b, slots: 2}]}"))
    assert "hosts: [{host: a}, {host: b, gpus: 2}]" in text
    assert "nodes: 2" in text


def test_a_hostfile_has_hosts_sets_slots_and_comments(hostfile: Path) -> None:
    job = from_file(hostfile, "# lab\n\n  gpu01 slots=8 # big\r\ngpu[02-03]\tgpus = 4\nana@cpu\n")
    assert names(job) == [("gpu01", 8), ("gpu02", 4), ("gpu03", 4), ("ana@cpu", None)]
    assert job.resources.nodes == 4


def test_a_number_behind_a_host_is_its_slots_as_with_horovod_and_mpich(hostfile: Path) -> None:
    expected = [("a", 4), ("b", None), ("gpu[1-2]", 8), ("fe80::1", None)]
    written = from_file(hostfile, "a:4\nb\ngpu[1-2]:8\nfe80::1\n")
    named = load_spec(SSH, environ={}, hosts=parse_hosts("a:4,b,gpu[1-2]:8,fe80::1")).job
    assert [[(host.host, host.gpus) for host in job.ssh.hosts] for job in (written, named)] == [expected, expected]


def test_a_hostfile_takes_the_place_of_the_hosts_of_the_spec(hostfile: Path) -> None:
    hostfile.write_text("b\n")
    text = SSH + "ssh: {hosts: [a], dir: ~/v}\n"
    ssh = load_spec(text, ["ssh.hosts=[c]"], environ={}, hosts=read_hostfile(hostfile)).job.ssh
    assert ([host.host for host in ssh.hosts], ssh.dir) == (["b"], "~/v")


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        ("a slots=0", 3, 'found "slots=0", expected slots=N with N from 1', None),
        ("a  slots=x", 4, 'found "slots=x", expected slots=N with N from 1', None),
        ("a slot=4", 3, 'found "slot=4", expected slots=N with N from 1. Did you mean "slots"?', None),
        ("a 4", 3, 'found "4", expected slots=N with N from 1', "write slots=4"),
        ("a b", 3, 'found "b", expected slots=N with N from 1', "a line names one host, or a set such as gpu[01-04]"),
        ("a slots = 1 port=22", 13, 'found "port=22", expected slots=N with N from 1', "a port belongs in ssh_config"),
        ("a slots=1 gpus=2", 11, '"gpus=2": the slots of "a" are set already', None),
        (
            "a:0",
            1,
            'found "a:0", expected a host without a number behind it',
            "{host: a, gpus: N} sets the number of GPUs; a port belongs in ssh_config",
        ),
        ("a:2 slots=2", 5, '"slots=2": the slots of "a:2" are set already', None),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_shown_with_its_place(
    hostfile: Path, line: str, column: int, message: str, hint: str | None
) -> None:
    assert problems_of_file(hostfile, f"first\n{line}\n") == [(2, column, message, hint)]


def test_all_wrong_lines_of_a_hostfile_are_reported_at_once(hostfile: Path) -> None:
    assert [found[0] for found in problems_of_file(hostfile, "a x\nb\nc y\n")] == [1, 3]


def test_wrong_lines_of_a_hostfile_are_reported_with_the_problems_of_the_spec(hostfile: Path) -> None:
    hostfile.write_text("a x\n")
    with pytest.raises(SpecError) as raised:
        load_spec(SSH + "nmae: y\n", environ={}, hosts=read_hostfile(hostfile))
    assert [one.key or one.line for one in raised.value.problems] == ["nmae", 1]


def test_slots_of_a_host_that_is_named_twice_do_not_add_up_and_the_sum_is_said(hostfile: Path) -> None:
    hint = "if 2 + 4 are meant, name it once with 6: each host is one node"
    assert problems_of_file(hostfile, "a slots=2\nb\na slots=4\n") == [(3, 1, "a is named twice", hint)]


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_a_hostfile_without_hosts_is_refused(hostfile: Path, text: str) -> None:
    assert problems_of_file(hostfile, text)[0][2] == "names no host"


def test_a_hostfile_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_hostfile(tmp_path / "gone")
    assert caught.value.problems[0].message == "cannot be read: No such file or directory"


@pytest.mark.parametrize("text", ["a,gpu[01,03],b", "a, gpu[01,03] b"])
def test_hosts_of_the_command_line_are_parted_by_commas_or_blanks(text: str) -> None:
    job = load_spec(SSH, environ={}, hosts=parse_hosts(text)).job
    assert [name for name, _ in names(job)] == ["a", "gpu01", "gpu03", "b"]


hosts = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True) | st.sampled_from(["n[1-3]", "r[1-2]n[01,04]", "me@x"])
lines = st.tuples(hosts, st.none() | st.integers(1, 128))


@settings(max_examples=100, deadline=None)
@given(st.lists(lines, min_size=1, max_size=8, unique_by=lambda line: line[0]), st.data())
def test_a_hostfile_says_the_same_however_it_is_laid_out(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int | None]], choices: st.DataObject
) -> None:
    blank = st.sampled_from(["", " ", "\t", "  "])
    text = ""
    for host, slots in rows:
        equals = choices.draw(blank) + "=" + choices.draw(blank)
        word = "" if slots is None else f" {choices.draw(st.sampled_from(['slots', 'gpus']))}{equals}{slots}"
        end = choices.draw(st.sampled_from(["", " # x slots=9", "#"])) + choices.draw(st.sampled_from(["\n", "\r\n"]))
        text += choices.draw(blank) + host + word + end + choices.draw(st.sampled_from(["", "\n", "# a b\n"]))
    expected = [(name, slots) for host, slots in rows for name in expand(host)]
    try:
        job = from_file(tmp_path_factory.getbasetemp() / "hosts", text)
    except SpecError:
        job = None
    if job is None:
        assert len({name for name, _ in expected}) < len(expected)
        return
    assert names(job) == expected
    assert load_spec(resolved_yaml(job), environ={}).job == job


PIECES = st.sampled_from(
    ["gpu01", "a", "-", "-o", " ", "\t", "\n", "\r\n", "#", "slots", "=", "4", "0", "[", "]", "1-3", ",", "@", ":", ".",
     "slots=2", "é", "\x1b", "\ufeff", "\\", "'", '"', "$(x)", "9" * 30]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join) | st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_hostfile_is_refused_in_words_or_names_hosts_that_ssh_takes_for_hosts(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    _is_read_or_refused(lambda: from_file(tmp_path_factory.getbasetemp() / "hosts", text))
    _is_read_or_refused(lambda: load_spec(SSH, environ={}, hosts=parse_hosts(text)).job)
    _is_read_or_refused(lambda: load(f"ssh: {{hosts: [{json.dumps(text)}]}}\n"))


def _is_read_or_refused(read: Any) -> None:
    job, refusal = None, None
    try:
        job = read()
    except SpecError as error:
        refusal = error
    if job is None:
        assert refusal is not None
        assert all(line.isprintable() for line in format_spec_error(refusal).split("\n"))
        return
    for name, gpus in names(job):
        assert name[0] not in "-@"
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set(" '\"$\\[]{}(),")
        assert gpus is None or gpus > 0
    assert len(dict(names(job))) == len(names(job)) == job.resources.nodes


def test_a_hostfile_may_come_from_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"a slots=2\nb\n")
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        job = load_spec(SSH, environ={}, hosts=read_hostfile(Path("-"))).job
    assert names(job) == [("a", 2), ("b", None)]
