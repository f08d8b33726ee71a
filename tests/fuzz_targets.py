"""What the fuzzer reads: for each thing from outside, valid examples, made by the code that writes them, and its reader."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import random
import re
import shutil
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal

from fuzz_mutations import Example, mutate, rows
from handmade_runs import complete, fail, make_gang, make_run, start_attempt, train

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir, read_json, write_json
from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run

JOBS = Path(__file__).resolve().parent.parent / "jobs"
TOKEN = "0123456789abcdef0123456789abcdef"
_SEEN = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e\u2028\ud800-\udfff]|\x1b(?!\\[[0-9]{1,2}m)")
"""What no command may print."""

Reader = Callable[[Any, bytes, random.Random], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that is read."""

    name: str
    examples: list[Example]
    read: Reader
    """Gets what the example is, its data, and chance."""
    reads_examples: bool = True
    """Whether an example that nothing has mutated is read without an error."""
    is_any_place_allowed: bool = False


def make_targets(root: Path) -> list[Target]:
    """Make the table below the directory of the cases."""
    records = _records(root)
    return [
        *[records] * 8,  # most of what is read
        _answers(),
        _mirrored(root),
        _requests(root),
        *_said_over_sockets(),
        *_printed_by_slurm(),
        *_printed_by_ssh(root),
        *_specs(root),
        _imported(root),
        _login_notes(root),
        _trees(root),
        _nodes_reports(root),
    ]


# Records: the files of a runs directory, read as commands read them.


def _records(root: Path) -> Target:
    runs_dir = root / "work" / "runs"
    made = [maker(runs_dir) for maker in (_running, _failed, _on_hosts, _by_torchrun, _on_slurm)]
    made += list(_swept(runs_dir))
    files = [path for run in made for path in sorted(run.rglob("*")) if _is_record(path)]
    examples = [Example(value=_value_of(path), what=path) for path in files]

    def read(path: Path, data: bytes, rng: random.Random) -> None:
        before = path.read_bytes()
        path.write_bytes(data)
        name = next(part for part in path.relative_to(runs_dir).parts)
        if name == "sweep" and rng.random() < 0.5:
            name = "sweep.0"
        try:
            _command(rng.choice(_COMMANDS), name, runs_dir)
        finally:
            path.write_bytes(before)

    return Target(name="records", examples=examples, read=read)


_COMMANDS = (
    *("status {run} -a", "status {run} -o json", "list", "list -o json", "status {run}"),
    *("logs {run} --rank all", "logs {run} --rank failed", "wait {run} --timeout 0"),
)


def _command(line: str, run: str, runs_dir: Path) -> None:
    """Run a command as people do; nothing that it prints commands a terminal."""
    from clusterddp.cli.main import cli
    from clusterddp.cli.terminal import Terminal

    arguments = [*line.format(run=run).split(), "--runs", str(runs_dir)]
    streams, printed = (sys.stdout, sys.stderr), [io.BytesIO(), io.BytesIO()]
    sys.stdout, sys.stderr = (io.TextIOWrapper(each, errors="backslashreplace", write_through=True) for each in printed)
    try:
        with cli.make_context("clusterddp", arguments, obj=Terminal(os.environ)) as context:
            cli.invoke(context)
    finally:
        held = sys.stdout, sys.stderr  # noqa: F841  their buffers would be closed with them
        sys.stdout, sys.stderr = streams
        text = b"".join(each.getvalue() for each in printed[arguments[0] == "logs" :]).decode()
    found = _SEEN.search(text)
    if found:
        raise AssertionError(f"prints {text[max(0, found.start() - 40) : found.end() + 40]!r}")


def _is_record(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.suffix in {".json", ".jsonl", ".txt", ".out", ".err"}


def _value_of(path: Path) -> Any:
    import json

    if path.suffix == ".jsonl":
        return rows(*map(json.loads, path.read_text().splitlines()))
    return read_json(path) if path.suffix == ".json" else path.read_bytes()


def _running(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "running")
    start_attempt(run)
    log_event(run, "submitted", attempt=0)
    log_event(run, "first_step", attempt=0, phases={"import": 1.0, "rendezvous": 0.5, "data": 2.0, "first_step": 3.0})
    train(run, steps=50)
    return run.path


def _failed(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "failed")
    fail(start_attempt(run), will_restart=True)
    fail(start_attempt(run, 1))
    return run.path


def _on_hosts(runs_dir: Path) -> Path:
    """Make a run over SSH whose plan nobody has sealed: its hosts are not asked."""
    from clusterddp.launch.ssh.plan import SshNode, SshPlan
    from clusterddp.run.host_reports import HostReport, start_of, write_reports

    run = make_run(runs_dir, "hosts")
    record = dataclasses.replace(read_run(run), launcher="ssh")
    write_run(run, record)
    hosts = ("gpu01", "gpu02")
    gang = make_gang(nodes=2, per_node=1)
    nodes = tuple(dataclasses.replace(node, host=host) for node, host in zip(gang.nodes, hosts, strict=True))
    ssh = SshPlan(hosts=tuple(SshNode(host=host, node_rank=n, gpus=0) for n, host in enumerate(hosts)), root="~/.x")
    write_json(run.plan, {"gang": dataclasses.replace(gang, nodes=nodes).to_json(), "ssh": ssh.to_json(), "spec": {}})
    end = {"outcome": "FAILED", "reason": "node 1 was lost", "ended": time.time(), "root_cause": None}
    known = {"asked": time.time(), "reached": time.time(), "alive": ("s1", "n1"), "boot": "b", "has_run": True}
    start = start_of(record)
    reports = [HostReport(host="gpu02", start=start, end=end, end_attempt=0, checkpoints=("step-1-a0",), **known)]
    run.launcher_dir.mkdir()
    write_reports(run, [HostReport(host="gpu01", start=start, asked=1.0, error="timed out"), *reports])
    start_attempt(run, per_node=1)
    return run.path


def _by_torchrun(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "torchrun")
    write_run(run, dataclasses.replace(read_run(run), launcher="none", job_id="torchrun"))
    attempt = start_attempt(run)
    complete(run, attempt)
    attempt.end.unlink()
    write_json(
        attempt.error_file(0),
        {"message": {"message": "x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1"}}},
    )
    return run.path


def _on_slurm(runs_dir: Path) -> Path:
    run = make_run(runs_dir, "slurm")
    write_run(run, dataclasses.replace(read_run(run), launcher="slurm", job_id="17", job_tag="0" * 20))
    return run.path


def _swept(runs_dir: Path) -> Iterator[Path]:
    from clusterddp.run.sweep_dir import SweepDir, SweepRecord, write_sweep
    from clusterddp.run.sweep_queue import QueueRecord, write_queue

    sweep = SweepDir(runs_dir / "sweep")
    for number in range(2):
        run = make_run(sweep.path, f"sweep.{number}")
        write_run(run, dataclasses.replace(read_run(run), queued=True, variant=f"lr={number}"))
        start_attempt(run).start.unlink()
    identity = dataclasses.asdict(ProcessIdentity.of())
    record = {"sweep": "sweep", "token": TOKEN, "name": "test", "launcher": "local", "created_ns": time.time_ns()}
    write_sweep(sweep, SweepRecord(**record, keys=("train.lr",), size=2, job_id="7", submitter=identity))
    write_queue(sweep, QueueRecord(process=identity, waits_for="GPUs"))
    sweep.tasks.write_text("sweep.0\nsweep.1\n")
    yield sweep.path


# Hosts: what an agent answers, and what it is asked.


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
    from clusterddp.launch.ssh.answers import ANSWERS
    from clusterddp.ssh.session import Session

    channel = Answering(answer)
    return Session(host="gpu01", connection=channel, channel=channel, answers=ANSWERS)  # type: ignore[arg-type]


def _answers() -> Target:
    from clusterddp.launch.ssh.answers import ANSWERS, HELLO

    examples = [Example(value={"ok": True, "size": 0, **_object(keys)}, what=do) for do, keys in ANSWERS.items()]
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
    return {key: _value(kind) for key, kind in keys.items()}


def _value(kind: Any) -> Any:
    """Return a value of a type as JSON has it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return _value(inner[0])
    if origin is Literal:
        return inner[0]
    if origin is dict:
        return {"x": _value(inner[1])}
    if origin in (list, frozenset) or (origin is tuple and inner[-1] is Ellipsis):
        return [_value(inner[0])] * 2
    if origin is tuple:
        return [_value(each) for each in inner]
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _object(typing.get_type_hints(kind))
    plain = {str: "x", int: 1, float: 1.5, bool: True, Path: "/x", type(None): None}
    return plain.get(kind)


def _mirrored(root: Path) -> Target:
    """Bring a run home from a host whose real answers are mutated on their way."""
    from clusterddp.host.agent_types import Host
    from clusterddp.launch.ssh.fetch import fetch
    from clusterddp.launch.ssh.pull import pull
    from clusterddp.launch.ssh.target import Target as OfHost
    from clusterddp.launch.ssh.target import Wants, newest_attempt
    from clusterddp.launch.ssh.told import record, report_of
    from clusterddp.look.status import read_status

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
        asked = iter(range(1000))
        hit = rng.choice((0, 1, 1, 2, 3)) if rng.getstate() != random.Random(0).getstate() else -1

        def answer(request: bytes) -> bytes:
            said = _ask_agent(host, request)
            return _mutated(rng, said) if next(asked) == hit else said

        session = _session(answer)
        logs = frozenset({0, 1})
        target = OfHost(
            run=run, name="hosts.01234567", token=TOKEN, host="gpu01", nodes=frozenset({0}), ranks=logs,
            is_head=True, fetch=("logs", "metrics", "checkpoints"),
        ).wanting(Wants(logs=logs, results=True))  # fmt: skip
        asks = [{"name": target.name, "token": TOKEN, "seen": ""}]
        told = session.ask("mirror.changes", {"runs": asks}).facts["runs"].get(target.name)
        if told is None:
            return
        target = target.wanting_from(newest_attempt(run, told["files"] or {}))
        pulled = pull(session, target, told["files"] or {})
        if pulled.problem is None:
            record(run, [report_of(target, told, told["files"] or {})])
            fetch(session, target, told["files"] or {}, lambda text: None)
        read_status(run)

    return Target(name="a run that is brought home", examples=[Example(value=b"", what=None)], read=read)


def _mutated(rng: random.Random, said: bytes) -> bytes:
    """Mutate the line of an answer, or what follows it."""
    import json

    line, newline, data = said.partition(b"\n")
    if data and rng.random() < 0.3:
        return line + newline + mutate(rng, Example(value=data))
    return mutate(rng, Example(value=json.loads(line))).replace(b"\n", b" ") + newline + data


def _ask_agent(host: Any, request: bytes, body: bytes = b"") -> bytes:
    from clusterddp.host.agent import answer_one

    answers = io.BytesIO()
    answer_one(host, request, io.BytesIO(body), answers)
    return answers.getvalue()


def _requests(root: Path) -> Target:
    """Ask the agent, as a launcher of the same user does; it may be told any place of that user."""
    import json

    from clusterddp.host.agent_types import Host

    name, sum_, nonce = "asked.01234567", "0" * 64, "1" * 32
    part = {"path": "metrics.jsonl", "offset": 0, "limit": 100, "like": [[0, 1, sum_]]}
    gang = make_gang().to_json()
    requests: list[dict[str, Any]] = [
        {"do": "beat"},
        {"do": "facts.clock"},
        {"do": "login.lay_out", "at": ".", "files": {"spec.yaml": "name: a"}, "sum": None, "within": ".", "git": None},
        {"do": "mirror.changes", "runs": [{"name": name, "token": TOKEN, "seen": ""}]},
        {"do": "mirror.read", "name": name, "parts": [part, part]},
        {"do": "run.prepare", "name": name, "attempt": 0, "plan": {"gang": gang}, "record": {"run": "x"}, "spec": "x"},
        {"do": "run.ask", "name": name, "what": "stop", "reason": "by hand"},
        {"do": "run.ask", "name": name, "what": "cancel", "reason": "by hand"},
        {"do": "run.release", "token": TOKEN},
        {"do": "store.missing", "sums": [sum_]},
        {"do": "store.checkout", "sum": sum_, "name": name},
        {"do": "store.put", "kind": "code", "sum": sum_, "size": 3},
        {"do": "store.mark", "nonce": nonce, "target": None},
        {"do": "store.unmark"},
        {"do": "store.seen", "nonces": [nonce], "target": None},
        {"do": "store.compare", "target": "~/data", "size": 2},
        {"do": "table.stored", "older_than_s": 1e9},
        {"do": "table.remove", "places": ["runs/x"], "older_than_s": 1e9},
        {"do": "trial.tell", "words": {}},
        {"do": "trial.stop"},
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


# What supervisors, ranks and machines say to each other.


class Wire:
    """Stands for a socket at whose other end somebody has said all that he will say."""

    def __init__(self, said: bytes) -> None:
        self._said = io.BytesIO(said)

    def recv(self, size: int) -> bytes:
        return self._said.read(size)

    def send(self, data: bytes) -> int:
        return len(data)

    sendall = send

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 29500

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.2", 40000

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


def _said_over_sockets() -> Iterator[Target]:
    yield _link()
    yield from _muster()
    yield from _joining()
    yield _probed()


def _link() -> Target:
    from clusterddp.node.link import Channel

    def read(is_signed: bool, data: bytes, rng: random.Random) -> None:
        nonce = b'{"nonce": "' + b"a" * 32 + b'"}\n'
        ours = Channel(Wire(b""), token=TOKEN, side="head", now=0.0)  # type: ignore[arg-type]
        ours._nonce = "b" * 32
        body = data.replace(b"\n", b" ")
        ours._nonces = ("b" * 32 + "a" * 32).encode()
        signed = ours._mac(b"member", 0, body) + b" " + body + b"\n"
        ours._nonces = None
        ours.sock = Wire(nonce + signed if is_signed else data + b"\n" + data)  # type: ignore[assignment]
        heard = ours.receive(1.0)
        ours.keep_alive(2.0, 15.0)
        if ours.lost is None or not all(isinstance(each["kind"], str) for each in heard):
            raise AssertionError(f"{ours.lost}: {heard}")

    said = [{"kind": "exit", "rank": 1, "exit_code": 1, "error": "x"}, {"kind": "beat"}]
    examples = [Example(value=each, what=True) for each in said] + [Example(value={"nonce": "a" * 32}, what=False)]
    return Target(name="the link of supervisors", examples=examples, read=read)


def _muster() -> Iterator[Target]:
    from clusterddp.dist.muster_guest import Visit, _stay
    from clusterddp.dist.muster_host import Guest, _Muster
    from clusterddp.dist.muster_words import own_hello
    from clusterddp.launch.foreign.place import Decided, nodes_of

    own = own_hello(rank=0, world_size=2, world_size_from="WORLD_SIZE", spec="0" * 64, identity="job")
    hello = dataclasses.asdict(dataclasses.replace(own, rank=1, nonce="other"))

    def read_hello(what: Any, data: bytes, rng: random.Random) -> None:
        muster = object.__new__(_Muster)
        muster._own, muster._guests, muster._left = own, {}, {}
        muster._selector, muster._scout, muster._deadline = (
            SimpleNamespace(unregister=lambda sock: None),
            SimpleNamespace(),
            1e9,
        )  # type: ignore[assignment]
        from collections import Counter

        muster._reached, muster._reached_at_home = Counter(), []
        guest = Guest(Wire(data + b"\n"))  # type: ignore[arg-type]
        if muster._read(guest) and guest.hello is not None:
            muster._admit(guest)
            nodes_of((own, guest.hello))

    def read_decided(what: Any, data: bytes, rng: random.Random) -> None:
        visit = Visit(Wire(b'{"complete": true}\n' + data + b"\n"))  # type: ignore[arg-type]
        answer = _stay(visit, visit.read(time.monotonic() + 1), time.monotonic() + 1)
        if not isinstance(answer, str):
            Decided.from_json(answer)

    decided = Decided(
        run="brisk-otter-3", token=TOKEN, attempt=0, identity="job", nodes=(("a", (0, 1)), ("b", (2, 3))), gpus=False,
        backend="gloo", master_addr="10.0.0.1", master_port=29500, reached="10.0.0.1",
    )  # fmt: skip
    answers = [Example(value={"decided": dataclasses.asdict(decided)})]
    yield Target(name="a rank that comes", examples=[Example(value=hello)], read=read_hello)
    yield Target(name="what rank 0 decides", examples=answers, read=read_decided)
    refused = [Example(value={"refused": "no", "hint": "none"}), Example(value={"other": True})]
    yield Target(name="what rank 0 refuses", examples=refused, read=read_decided, reads_examples=False)


def _joining() -> Iterator[Target]:
    from clusterddp.launch.joining.head import Gathering, Visitor
    from clusterddp.launch.joining.member import Seat
    from clusterddp.launch.joining.words import Line, prove, veil

    facts: dict[str, str | None] = {"clusterddp": "1", "torch": "2", "Python": "3.12"}

    def gathering() -> Gathering:
        return Gathering(hosts=("a", "b"), spec={"name": "x"}, facts=facts, key="k", port=1, tell=lambda text: None)

    def read_visitor(what: Any, data: bytes, rng: random.Random) -> None:
        here = gathering()
        visitor = Visitor(line=Line(Wire(data + b"\n")), nonce="n", came=time.monotonic(), peer="p", reached="r")  # type: ignore[arg-type]
        here._strangers.append(visitor)
        here._hear_all()
        here._hear_all()

    who = {"node_rank": 1, "host": "b", "pid": 7, "facts": facts, "spec": {"name": "x"}, "proof": prove("k", "n", 1)}
    yield Target(name="a machine that joins", examples=[Example(value=who)], read=read_visitor)

    def read_seat(what: Any, data: bytes, rng: random.Random) -> None:
        seat = Seat(hosts=("a", "b"), node_rank=1, port=1, key="k", tell=lambda text: None)
        line = Line(Wire(data))  # type: ignore[arg-type]
        line.hear_all = line.hear()  # type: ignore[attr-defined]
        seat._heard = line.hear_all  # type: ignore[attr-defined]
        line.ended = True
        seat._connect = lambda head, deadline, timeout_s: line  # type: ignore[method-assign]
        seat._next = lambda deadline: seat._heard.pop(0) if seat._heard else None  # type: ignore[method-assign]
        seat.take({"name": "x"}, facts, 0.1)

    begin = {"run": "x", "token": veil(TOKEN, "k", "n"), "attempt": 0, "link": {"host": "a", "port": 7}}
    words = rows(
        {"clusterddp": "join", "nonce": "n"}, {"waiting_for": ["node 2 (c)"]}, begin | {"master_addr": "10.0.0.1"}
    )
    yield Target(name="what node 0 says to a machine", examples=[Example(value=words)], read=read_seat)

    def read_news(what: Any, data: bytes, rng: random.Random) -> None:
        from clusterddp.launch.joining.news import Joined

        run = RunDir(Path.cwd() / "joined")
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir()
        supervisor = SimpleNamespace(pid=os.getpid(), poll=lambda: None, stdin=None)
        seat = Seat(hosts=("a", "b"), node_rank=1, port=1, key="k", tell=lambda text: None)
        seat._line = Line(Wire(data + b"\n"))  # type: ignore[arg-type]
        Joined(run, 1, supervisor, seat)._exchange()  # type: ignore[arg-type]

    started = {
        "started": {"attempt": 0, "supervisor": dataclasses.asdict(ProcessIdentity.of()), "nodes": []},
        "attempt": 0,
    }
    ended = {"ended": {"outcome": "FAILED", "reason": "x", "ended": 1.0, "root_cause": None}, "attempt": 0}
    yield Target(name="news of a joined run", examples=[Example(value=started), Example(value=ended)], read=read_news)


def _probed() -> Target:
    from clusterddp.host.listener import PAYLOAD
    from clusterddp.host.ways import Target as Way
    from clusterddp.host.ways import Try

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        attempt = object.__new__(Try)
        attempt.target = Way(target=0, address="10.0.0.1", port=7, name="gpu01")
        attempt.outcome, attempt.detail, attempt.left_from, attempt.seen_from, attempt.round_trip_ms = (
            None,
            "",
            None,
            None,
            None,
        )
        attempt._unsent, attempt._heard, attempt._connected = b"", b"", True
        attempt.socket = SimpleNamespace(  # type: ignore[assignment]
            recv=Wire(data.ljust(PAYLOAD)).recv, getsockopt=lambda *names: bytes(104)
        )
        attempt.go_on()
        attempt.facts()

    return Target(
        name="who answers at an address", examples=[Example(value={"name": "gpu01", "seen": "10.0.0.2"})], read=read
    )


# Programs: what Slurm and OpenSSH print.


def _printed_by_slurm() -> Iterator[Target]:
    from clusterddp.dist.hostlist import expand
    from clusterddp.slurm import arrays, cluster, control, explain, jobs, partitions, queue, starter, time_left

    tag = "0" * 20
    stamps = ("2026-11-24T20:00:00", "N/A", "2026-11-25T20:00:00")
    squeue = jobs.SEPARATOR.join(("17", "17", "N/A", "RUNNING", *stamps, "gpu", "2", "n[1-2]", "None", f"x.{tag}"))
    array = jobs.SEPARATOR.join(("18", "17", "3", "PENDING", *stamps, "gpu", "2", "", "Resources", f"x.{tag}"))
    sacct = jobs.SEPARATOR.join(("17_3", "CANCELLED by 0", "0:15", *stamps, "gpu", "2", "n[1-2]", f"x.{tag}"))
    show = f"JobId=17 JobName=x.{tag} UserId=a(1) JobState=RUNNING Reason=None Restarts=1 PreemptTime=None "
    show += f"RunTime=00:10:00 TimeLimit=1-00:00:00 StartTime={stamps[0]} EndTime={stamps[2]} SuspendTime=None"
    config = (
        "MaxArraySize = 1001\nMaxJobCount = 10000\nSchedulerParameters = bf_max,max_array_tasks=10\nKillWait = 30 sec\n"
        "ClusterName = c\nSLURM_VERSION = 23.02.1\nAccountingStorageType = accounting_storage/slurmdbd\nMinJobAge = 300 sec\n"
        "AccountingStorageEnforce = associations\nJobRequeue = 1\nPreemptMode = OFF\nProctrackType = proctrack/cgroup\n"
    )
    partition = "PartitionName=gpu Default=YES MaxTime=2-00:00:00 DefaultTime=01:00:00 State=UP GraceTime=60 MaxNodes=4 AllowAccounts=a,b"
    sinfo = partitions.SEPARATOR.join(("gpu", "4", "64", "256000", "mix*", "gpu:a100:4(S:0-1),mps:400"))
    association = "c|a||normal|100|2-00:00:00"
    readers: dict[str, Callable[[str], object]] = {
        "scontrol show job": lambda text: (control.read_job(text), time_left.read_time_left_s(text)),
        "scontrol show config": lambda text: (
            arrays.array_limits(text),
            time_left.read_kill_wait_s(text),
            cluster.describe_cluster(cluster.parse_config(text), user=cluster.User(name="a")).version_number,
        ),
    }

    def read_jobs(reader: Callable[[str], list[jobs.Job]], text: str) -> None:
        for job in queue._newest(reader(text)).values():
            explain.explain_waiting(job)
            explain.explain_end(job)
            repr(job.phase)

    def read_cluster(what: str, text: str) -> None:
        groups = partitions.parse_node_groups(text if what == "sinfo" else sinfo)
        found = partitions.parse_partitions(text if what == "partitions" else partition, groups)
        known = partitions.parse_associations(text if what == "associations" else association, cluster=None)
        facts = cluster.describe_cluster({}, user=cluster.User(name="a"), partitions=found, associations=known)
        chosen = starter.choose_partition(facts)
        if chosen is not None:
            starter.fill_in(facts, chosen)
        list(starter.consequences(facts, chosen))

    def read(what: str, data: bytes, rng: random.Random) -> None:
        text = data.decode(errors="replace")
        if what in {"squeue", "sacct"}:
            read_jobs(jobs.read_squeue if what == "squeue" else jobs.read_sacct, text)
        elif what in {"sinfo", "partitions", "associations"}:
            read_cluster(what, text)
        elif what == "hosts":
            expand(text)
        else:
            readers[what](text)

    texts = {
        "squeue": f"{squeue}\n{array}\n", "sacct": f"{sacct}\n", "scontrol show job": f"{show}\n",
        "scontrol show config": config, "sinfo": f"{sinfo}\n", "partitions": f"{partition}\n",
        "associations": f"{association}\n", "hosts": "rack[1-2]node[03-10,12],login1",
    }  # fmt: skip
    yield Target(
        name="Slurm's commands", examples=[Example(value=text, what=what) for what, text in texts.items()], read=read
    )


def _printed_by_ssh(root: Path) -> Iterator[Target]:
    from clusterddp.dist.launched import find_place
    from clusterddp.ssh.keys import _parse

    key = "AAAAC3NzaC1lZDI1NTE5AAAAIJ0000000000000000000000000000000000000000000"
    known = f"# Host gpu01 found: line 3\ngpu01 ssh-ed25519 {key}\n# Host gpu01 found: line 4 CA\n@cert-authority * ssh-ed25519 {key}\n"

    def read_keys(what: Any, data: bytes, rng: random.Random) -> None:
        _parse(data.decode(errors="replace"), root / "known_hosts")

    yield Target(name="ssh-keygen -F", examples=[Example(value=known)], read=read_keys)
    torchrun = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    srun = {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    mpirun = {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
        "PMIX_SERVER_URI4": "prterun-n1-1@0;tcp4://10.0.0.1:1", "PMIX_NAMESPACE": "prterun-n1-1@1",
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1,10.1.0.1:1", "OMPI_MCA_orte_node_regex": "n[1:1-2]@0(2)",
    }  # fmt: skip
    pods = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }

    def read_environment(what: Any, data: bytes, rng: random.Random) -> None:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        find_place(dict(line.partition("=")[::2] for line in lines if line.partition("=")[1]))

    examples = [
        Example(value="\n".join(f"{name}={value}" for name, value in each.items()))
        for each in (torchrun, srun, mpirun, pods)
    ]
    yield Target(name="variables of launchers", examples=examples, read=read_environment)


# What people write.


def _specs(root: Path) -> Iterator[Target]:
    from clusterddp.errors import SpecError
    from clusterddp.spec.hostfile import parse_hosts, read_hostfile
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.overrides import parse_environment
    from clusterddp.spec.problems import format_spec_error

    file = root / "work" / "read.yaml"

    def load(**how: Any) -> None:
        try:
            resolved = load_spec(file, environ={}, **how)
        except SpecError as error:
            text = format_spec_error(error)
            if not text.isprintable() and _SEEN.search(text):
                raise AssertionError(repr(text)) from error
            return
        resolved.changes()

    def read_spec(what: Any, data: bytes, rng: random.Random) -> None:
        file.write_bytes(data)
        load()

    texts = [path.read_text() for path in sorted(JOBS.glob("*.yaml"))]
    small = "name: a\nresources: {nodes: 2, time: 1-00:00:00, memory_gb: 4}\nenv: {A: b}\nslurm: {mail_user: x}\ntrain: {dataset: shapes}\n"
    yield Target(name="specs", examples=[Example(value=text) for text in (small, *texts)], read=read_spec)

    def read_values(what: str, data: bytes, rng: random.Random) -> None:
        text = data.decode("utf-8", "surrogateescape")
        file.write_text(small)
        if what == "argument":
            load(overrides=[text])
        elif what == "hosts":
            load(hosts=parse_hosts(text), flags={"launcher": "ssh"})
        elif what == "variable":
            name, _, value = text.partition("=")
            parse_environment({f"CLUSTERDDP__{name}": value})
        else:
            (root / "work" / "hostfile").write_bytes(data)
            load(hosts=read_hostfile(root / "work" / "hostfile"), flags={"launcher": "ssh"})

    arguments = (
        *("train.lr=0.2", "+env.NAME=1", "~train.epochs", "resources.time=1-02:03:04", "train.epochs=4", "restarts=2"),
        *(
            "resources.memory_gb=1.5",
            "network.master_port=29500",
            'entry={script: "a.py", args: [1, x]}',
            "secrets=[HF_TOKEN]",
        ),
        *("ssh.hosts=[gpu01, {host: gpu02, gpus: 4}]", "train.amp=true", "network.interface=eth0", "device=cpu"),
    )
    examples = [Example(value=text, what="argument") for text in arguments]
    examples += [Example(value=text, what="hosts") for text in ("a:4,b:4", "gpu[01-04],me@x", "fe80::1")]
    examples += [Example(value=text, what="variable") for text in ("TRAIN__LR=0.2", "ENV__A=b")]
    examples += [Example(value="gpu01 slots=8\n# x\ngpu[02-04] gpus = 4\nn:2\n", what="hostfile")]
    yield Target(name="values of a spec", examples=examples, read=read_values, reads_examples=False)


def _imported(root: Path) -> Target:
    from clusterddp.launch.importing.reading import import_files

    batch = (
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4\n#SBATCH --gres=gpu:4\n#SBATCH -t 1-00:00:00\n"
        "export A=1 B=${HOME}/x\nN=${SLURM_NNODES:-2}\nARGS=(--lr 0.1 --name $A)\nif true; then module load cuda; fi\n"
        "cat <<EOF > x\nhello\nEOF\nsrun torchrun --nproc_per_node 4 --nnodes $N train.py ${ARGS[@]} --data ~/x\n"
    )
    accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\nmain_process_port: 29500\n"
    gluon = "DDP_CONFIG:\n  AUTO_RANK_MATCH: True\n  WORLD_SIZE: 2\n  WORLD_RANK: 0\n  WOLRD_URLS: ['10.0.0.1', '10.0.0.2']\nCONFIG:\n  TRAIN:\n    EPOCH_NUM: 3\n"
    files = {
        "train.slurm": batch,
        "accelerate.yaml": accelerate,
        "gluon.yaml": gluon,
        "hostfile": "a slots=4\nb slots=4\n",
    }
    files[".deepspeed_env"] = "NCCL_DEBUG=INFO\nHF_TOKEN=hunter2\n"
    kinds = {"train.slurm": "slurm", "accelerate.yaml": "accelerate", "gluon.yaml": "gluoncv", "hostfile": "hostfile"}

    def read(name: str, data: bytes, rng: random.Random) -> None:
        path = root / "work" / name
        path.write_bytes(data)
        import_files([path], kind=rng.choice((None, kinds.get(name, "env"))))  # type: ignore[arg-type]

    return Target(name="imports", examples=[Example(value=text, what=name) for name, text in files.items()], read=read)


# What is left.


def _login_notes(root: Path) -> Target:
    from clusterddp.launch.login.record import SentRun, find_sent_run, list_sent_runs, write_sent_run

    runs_dir = root / "work" / "sent"
    make_run(runs_dir, "here")
    login = {"host": "login", "host_key": None, "runs_dir": "~/runs"}
    write_sent_run(runs_dir, SentRun(run="brisk-otter-3", profile="hpc", login=login, secrets=("A",), created_ns=1))
    path = runs_dir / ".login" / "brisk-otter-3.json"
    example = Example(value=read_json(path))

    def read(what: Any, data: bytes, rng: random.Random) -> None:
        before = path.read_bytes()
        path.write_bytes(data)
        try:
            list_sent_runs(runs_dir)
            find_sent_run(runs_dir, rng.choice(("@last", "brisk", "here")))
        finally:
            path.write_bytes(before)

    return Target(name="notes of a login node", examples=[example], read=read)


def _trees(root: Path) -> Target:
    from clusterddp.run.tree import from_json, list_tree, to_json
    from clusterddp.run.tree_stream import Sending, receive_tree

    source, target = root / "tree", root / "work" / "tree"
    (source / "a").mkdir(parents=True)
    (source / "a" / "b.py").write_text("x" * 40)
    (source / "c").symlink_to("a/b.py")
    entries, _ = list_tree(source)
    stream = b"".join(Sending(root=source, entries=entries).chunks())

    def read(what: str, data: bytes, rng: random.Random) -> None:
        import json

        if what == "list":
            with contextlib.suppress(ValueError):  # as documented
                list(from_json(json.loads(data)))
            return
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        receive_tree(io.BytesIO(data).read, target, read_only=False)

    examples = [Example(value=stream, what="stream"), Example(value=to_json(entries), what="list")]
    return Target(name="files on their way", examples=examples, read=read)


def _nodes_reports(root: Path) -> Target:
    from clusterddp.doctor.job import JobAnswer, _all_done, _collect
    from clusterddp.doctor.nodes import judge_nodes
    from clusterddp.doctor.probe import print_lines
    from clusterddp.facts.judge import Needs
    from clusterddp.facts.machine import Machine
    from clusterddp.wire import build

    machine = _value(Machine)
    here = build(Machine, machine)
    way = {
        "name": "n1",
        "addresses": ["10.0.0.1"],
        "reached": "10.0.0.1",
        "source": "10.0.0.2",
        "interface": "eth0",
        "clock_offset_s": 0.0,
        "error": "",
    }
    report = {"node_rank": 0, "node": "n1", "nonce": "same", "machine": machine, "way": way, "done": True}
    folder = root / "work" / "doctor"
    folder.mkdir()

    def read(what: str, data: bytes, rng: random.Random) -> None:
        text = data.decode(errors="replace")
        (folder / "node-0.json").write_bytes(data if what == "file" else b"")
        (folder / "job.out").write_text(
            "\n".join(print_lines(0, True, text)) if what == "lines" else "", errors="replace"
        )
        _all_done(SimpleNamespace(num_nodes=1), folder)  # type: ignore[arg-type]
        reports, words = _collect(folder)
        answer = JobAnswer(
            job_id="1", nodes=("n1", *reports), reports=reports, submitted=0.0, collected=1.0, words=words
        )
        judge_nodes(answer, here, Needs())

    return Target(
        name="reports of a doctor's nodes",
        examples=[Example(value=report, what=what) for what in ("file", "lines")],
        read=read,
    )


_ = Iterable, ClusterddpError
