"""What the fuzzer mutates between a launcher and an agent: answers, requests, files on their way."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal

from clusterddp.run.directory import RunDir
from clusterddp.run.record import log_event
from clusterddp.system.files import write_json
from clusterddp.wire import read_value
from tests.fuzz.mutations import TOKEN, Example, Target, mutate
from tests.support.agent_hosts import stand_ins
from tests.support.handmade_runs import make_gang, make_run, start_attempt, train


class Answering:
    """Stands for the SSH channel and connection to a host that answers as it likes."""

    eof_received = True
    transport = SimpleNamespace(is_active=lambda: False)

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._said = io.BytesIO()

    def settimeout(self, seconds: float) -> None:
        pass

    def recv_stderr_ready(self) -> bool:
        return False

    def sendall(self, data: bytes) -> None:
        self._said = io.BytesIO(self._answer(data))

    def recv(self, size: int) -> bytes:
        return self._said.read(size)

    def close(self) -> None:
        self._answer = lambda data: b""


def _session(answer: Callable[[bytes], bytes]) -> Any:
    from clusterddp.places.ssh.session import Session

    channel = Answering(answer)
    return Session(**stand_ins("gpu01"), channel=channel)  # type: ignore[arg-type]


def answers() -> Target:
    from clusterddp.places.ssh.agent.operations import HELLO, OPERATIONS

    examples = [
        Example(value={"ok": True, "size": 0, **_object(operation.answer)}, what=do)
        for do, operation in OPERATIONS.items()
    ]
    examples += [
        Example(value={"ok": False, "error": "no", "hint": None}, what="beat"),
        Example(value={"ok": True, **_object(HELLO)}),
    ]

    def read(do: str | None, data: bytes, rng: random.Random) -> None:
        if do is None:
            session = _session(lambda request: b"welcome\nclusterddp-agent " + data + b"\n")
            session.sent = session._send(b"x", 1.0)
            session.read_marked(HELLO, 1.0)
        elif do != "beat" or not data.startswith(b'{"ok": false'):
            _session(lambda request: data + b"\n").ask(do)

    return Target(name="answers of a host", examples=examples, read=read)


def _object(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value_of(kind) for key, kind in keys.items()}


def value_of(kind: Any) -> Any:  # noqa: PLR0911  one return for each kind of type
    """Return a value of a type as JSON has it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return value_of(inner[0])
    if origin is Literal:
        return inner[0]
    if origin is dict:
        return {"x": value_of(inner[1])}
    if origin in (list, frozenset) or (origin is tuple and inner[-1] is Ellipsis):
        return [value_of(inner[0])] * 2
    if origin is tuple:
        return [value_of(each) for each in inner]
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _object(typing.get_type_hints(kind))
    plain = {str: "x", int: 1, float: 1.5, bool: True, Path: "/x", type(None): None}
    return plain.get(kind)


def mirrored(root: Path) -> Target:
    """Download a run from a host whose real answers are mutated on their way."""
    from clusterddp.places.ssh.agent.operations import Host
    from clusterddp.places.ssh.download import download
    from clusterddp.places.ssh.host_run import HostRun, Wants, newest_attempt, report_of, update_reports
    from clusterddp.planning.ssh import SshNode
    from clusterddp.view.status import read_status

    host = Host(root=root / "host", package=root, patience_s=600)
    there = make_run(root / "host" / "runs", "hosts.01234567")
    start_attempt(there)
    for name, text in (
        ("output/model.txt", "x" * 100),
        ("tb/events", "y" * 50),
        ("checkpoints/step-1-a0.pt", "z" * 99),
    ):
        (there.path / name).parent.mkdir(exist_ok=True)
        (there.path / name).write_text(text)
    import hashlib

    manifest = {"file": "step-1-a0.pt", "sha256": hashlib.sha256(b"z" * 99).hexdigest(), "bytes": 99}
    write_json(there.checkpoints / "step-1-a0.json", manifest)
    (there.attempt(0).stdout(0)).write_text("hello\n" * 100)
    train(there, steps=20)
    log_event(there, "started", attempt=0)
    copy = root / "work" / "copies" / "hosts"
    original = root / "work" / "runs" / "hosts"

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        run = RunDir(copy)
        host.listed.clear()
        asked = iter(range(1000))
        hit = rng.choice((0, 1, 1, 2, 3)) if rng.getstate() != random.Random(0).getstate() else -1

        def answer(request: bytes) -> bytes:
            said = _ask_agent(host, request)
            return _mutated(rng, said) if next(asked) == hit else said

        session = _session(answer)
        logs = frozenset({0, 1})
        host_run = HostRun(
            run=run, name="hosts.01234567", token=TOKEN, node=SshNode(host="gpu01"), ranks=logs,
            fetch=("logs", "metrics", "checkpoints"),
        ).wanting(Wants(logs=logs, results=True))  # fmt: skip
        asks = [{"name": host_run.name, "token": TOKEN, "begin": 0, "rejoins": False}]
        listed = session.ask("run.look", {"runs": asks}).facts["runs"].get(host_run.name)
        if listed is None:
            return
        host_run = host_run.wanting_from(newest_attempt(run, listed["files"] or {}))
        done = download(session, host_run, listed["files"] or {}, lambda text: None)
        if done.has_records:
            update_reports(run, [report_of(host_run, listed, listed["files"] or {})])
        read_status(run)

    return Target(name="a run that is downloaded", examples=[Example(value=b"", what=None)], read=read)


def listings(root: Path) -> Iterator[Target]:
    """Read what a host lists: any names, also of files that a run may have; and what it answers instead."""
    from clusterddp.errors import SshError
    from clusterddp.places.ssh.host_run import HostRun, Wants, checkpoints_among, newest_attempt, report_of
    from clusterddp.places.ssh.sessions import SessionPool
    from clusterddp.planning.ssh import SshNode

    run, node = make_run(root / "listed", "hosts"), SshNode(host="gpu01")
    wants = Wants(logs=frozenset({0}), results=True)
    host_run = HostRun(
        run=run, name="hosts.01234567", token=TOKEN, node=node, ranks=frozenset({0, 1}), fetch=("logs", "checkpoints"),
        wants=wants,
    )  # fmt: skip
    answer = {"alive": ["s0"], "boot": "b", "has_run": True, "end_attempt": None, "end": None}

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        names = data.decode("utf-8", "surrogateescape").split("\n")
        files = dict.fromkeys(names, (3, 10**18))
        report_of(host_run, answer, files)
        checkpoints_among(files)
        taken = host_run.wanting_from(newest_attempt(run, files))
        for name in names:
            if taken.kind_of(name) is not None and not taken.place_of(name).resolve().is_relative_to(
                run.path.resolve()
            ):
                raise AssertionError(f"{name!r} is outside of the run")

    def ask(what: Any, data: bytes, rng: random.Random) -> None:
        pool = SessionPool(lambda node: _session(lambda request: data))
        try:
            works = {node: lambda session: session.ask("run.look").facts["runs"]["x"]["files"]["y"]}
            (found,) = pool.run("look", works, 10.0).values()
        finally:
            pool.close()
        if not isinstance(found, SshError) or len(str(found)) > 3000:
            raise AssertionError(f"{found!r:.200}")

    paths = (
        *("attempts/0/ranks/0.json", "attempts/0/results/1.pkl", "attempts/3/logs/rank-000.out", "attempts/1/end.json"),
        *("attempts/0/logs/node-0.times", "launcher/supervisor-0.log", "attempts/0/stacks/1795600000-0a1b2c.json"),
        *("checkpoints/step-00000007-a0.json", "checkpoints/step-00000007-a0.pt", "tb/events", "output/model.txt"),
    )
    yield Target(name="names that a host lists", examples=[Example(value="\n".join(paths))], read=read)
    look = {
        "boot": "b",
        "alive": [],
        "has_run": True,
        "end_attempt": 0,
        "end": {},
        "files": {"a": [1, 1]},
        "more": False,
    }
    said = Example(value={"ok": True, "size": 0, "runs": {"x": look}})
    yield Target(name="what a host of several says", examples=[said], read=ask)


def _mutated(rng: random.Random, said: bytes) -> bytes:
    """Mutate the line of an answer, or what follows it."""
    import json

    line, newline, data = said.partition(b"\n")
    if data and rng.random() < 0.3:
        return line + newline + mutate(rng, Example(value=data))
    return mutate(rng, Example(value=json.loads(line))).replace(b"\n", b" ") + newline + data


def _ask_agent(host: Any, request: bytes, body: bytes = b"") -> bytes:
    from clusterddp.places.ssh.agent.main import answer_one

    answers = io.BytesIO()
    answer_one(host, request, io.BytesIO(body), answers)
    return answers.getvalue()


def requests(root: Path) -> Target:
    """Ask the agent, as a launcher of the same user does; it may receive any place of that user."""
    import json

    from clusterddp.places.ssh.agent.operations import Host

    name, sum_ = "asked.01234567", "0" * 64
    part = {"path": "metrics.jsonl", "offset": 0, "limit": 100}
    gang = make_gang().to_json()
    requests: list[dict[str, Any]] = [
        {"do": "beat"},
        {"do": "host.list", "tokens": [TOKEN], "older_than_s": 1e9},
        {"do": "host.remove", "places": ["runs/x"], "older_than_s": 1e9},
        {"do": "host.remove", "places": ["runs/x.0123abcd"], "older_than_s": None},
        {"do": "run.look", "runs": [{"name": name, "token": TOKEN, "begin": 1, "rejoins": True}]},
        {"do": "run.read", "name": name, "parts": [part, part]},
        {"do": "run.prepare", "name": name, "attempt": 0, "plan": {"gang": gang}, "record": {"run": "x"}, "spec": "x"},
        {"do": "run.ask", "name": name, "what": "stop", "reason": "by hand"},
        {"do": "run.ask", "name": name, "what": "cancel", "reason": "by hand"},
        {"do": "run.ask", "name": name, "what": "stacks", "reason": "1795600000-0a1b2c"},
        {"do": "run.ask", "name": name, "what": "release", "reason": ""},
        {"do": "store.compare", "sum": sum_},
        {"do": "store.compare", "target": "~/data", "size": 2},
        {"do": "store.put", "sum": sum_, "size": 3},
    ]
    host = Host(root=root / "asked", package=root, patience_s=600)
    make_run(host.root / "runs", name)

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                answered = _ask_agent(host, data.replace(b"\n", b" ") + b"\n", b"[]xx")
            except SystemExit as end:  # the agent leaves, and says why in a line
                if not isinstance(end.code, str):
                    raise AssertionError(f"leaves with {end.code!r}") from end
                return
        line = json.loads(answered.partition(b"\n")[0])
        if not isinstance(line["ok"], bool) or "Traceback" in said.getvalue():
            raise AssertionError(said.getvalue() or repr(line))

    examples = [Example(value=request) for request in requests]
    return Target(name="requests to an agent", examples=examples, read=read, is_any_place_allowed=True)


def trees(root: Path) -> Target:
    from clusterddp.system.archive import Archive, unpack
    from clusterddp.system.file_set import from_json, list_files, to_json

    source, target = root / "tree", root / "work" / "tree"
    (source / "a").mkdir(parents=True)
    (source / "a" / "b.py").write_text("x" * 40)
    (source / "c").symlink_to("a/b.py")
    files = list_files(source)
    archive = b"".join(Archive(files=files).chunks())

    def read(what: str, data: bytes, rng: random.Random) -> None:
        if what == "list":
            with contextlib.suppress(ValueError):  # as documented
                list(from_json(read_value(data)))
            return
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        unpack(io.BytesIO(data).read, target, read_only=False)

    examples = [Example(value=archive, what="archive"), Example(value=to_json(files.entries), what="list")]
    return Target(name="files on their way", examples=examples, read=read)
