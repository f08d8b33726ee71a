"""Ranks that complete without a connection to the master, or without a collective: the end has a warning."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from clusterddp.cli.main import main
from clusterddp.node.local_ranks import was_connected
from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.gang import Gang
from tests.support.gang_runs import GangRun, make_gang, running, started
from tests.support.handmade_runs import make_run, start_attempt
from tests.support.waiting import wait_until

MEET = """
import socket
def meet(address, port):
    # As a store does: rank 0 listens and is a client of itself, too.
    if rank == 0:
        server = socket.create_server((address, port), reuse_port=False)
        clients = [server.accept()[0] for _ in range(3)]
        return [client.recv(1) for client in clients]
    while True:
        try:
            client = socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.02)
            continue
        client.sendall(b"x")
        return client.recv(1)
"""
AT_THE_MASTER = MEET + "meet(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
ELSEWHERE = MEET + "meet('127.0.0.2', int(os.environ['MASTER_PORT']))\n"


def warning_of(tmp_path: Path, program: str, gang: Gang | None = None) -> str:
    with started(tmp_path, gang) if gang else running(tmp_path, program) as run:
        assert run.await_end() == [0] * len(run.gang.nodes), run.logs()
        assert run.end().outcome == "COMPLETED"
        return run.end().warning


def test_ranks_that_have_connected_to_the_master_are_not_warned_of(tmp_path: Path) -> None:
    assert warning_of(tmp_path, AT_THE_MASTER) == ""


@pytest.mark.parametrize("program", ["print('alone')", ELSEWHERE], ids=["no connection", "an address of their own"])
def test_ranks_on_two_hosts_that_never_connected_to_the_master_are_warned_of(tmp_path: Path, program: str) -> None:
    warning = warning_of(tmp_path, program)
    port = json.loads((tmp_path / "run/attempts/0/start.json").read_text())["master_port"]
    assert warning == f"no rank connected to 127.0.0.1:{port}; each of the 4 ranks may have trained alone"


def test_ranks_that_meet_by_a_file_need_no_connection(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "print('by file')")
    gang = dataclasses.replace(gang, entry=dataclasses.replace(gang.entry, init="file"))
    assert warning_of(tmp_path, "", gang) == ""


def test_ranks_of_one_host_may_meet_where_they_like(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "print('here')", nodes=1)
    assert warning_of(tmp_path, "", gang) == ""


TRAIN = """
import itertools, torch, torch.distributed as dist
model = torch.nn.Linear(4, 1)
def goes_on(step):
    return not (run_dir / "GO").exists()
{prepare}
up()
for step in itertools.takewhile(goes_on, itertools.count()):
    time.sleep(0.1)
    loss = model(torch.randn(8, 4)).pow(2).mean()
    loss.backward()
{close}
"""
JOIN = "dist.init_process_group('gloo')"
WRAP = """
model = torch.nn.parallel.DistributedDataParallel(model)
def goes_on(step):
    # Rank 0 names the last step, which is the same for both: each step waits for the other rank.
    if rank == 0 and (run_dir / "GO").exists():
        (run_dir / f"last-{step + 2}").touch()
    return not (run_dir / f"last-{step}").exists()
"""
CLOSE = "dist.destroy_process_group()"
ALONE = (
    "no rank was seen in a collective; each of the 2 ranks may have trained alone, which is right if they need not meet"
)


def await_looks(run: GangRun) -> None:
    """Wait until all ranks were looked at, since a look may have begun before."""
    for _ in range(2):
        before = modified(run)
        wait_until(lambda before=before: modified(run) != before)  # type: ignore[misc]


def modified(run: GangRun) -> int:
    usage = run.attempt().usage
    return usage.stat().st_mtime_ns if usage.exists() else 0


@pytest.mark.parametrize(
    ("prepare", "close", "nodes", "expected"),
    [
        ("", "", 1, ALONE),
        (JOIN, CLOSE, 2, ALONE),
        (JOIN + WRAP, CLOSE, 1, ""),
        (JOIN, "dist.barrier()\nwhile not (run_dir / 'END').exists():\n    time.sleep(0.1)\n" + CLOSE, 1, ""),
    ],
    ids=["no group", "an unused group on 2 hosts", "DDP", "met late"],
)
def test_ranks_that_were_seen_in_no_collective_are_warned_of(
    tmp_path: Path, prepare: str, close: str, nodes: int, expected: str
) -> None:
    gang = make_gang(tmp_path, TRAIN.format(prepare=prepare, close=close), nodes=nodes, ranks_per_node=2 // nodes)
    with started(tmp_path, gang) as run:
        run.await_up()
        await_looks(run)
        (run.run.path / "GO").touch()
        if "END" in close:
            await_looks(run)
            (run.run.path / "END").touch()
        assert run.await_end(40) == [0] * nodes, run.logs()
        assert (run.end().outcome, run.end().warning) == ("COMPLETED", expected)


def test_ranks_whose_program_knows_nothing_of_torch_need_not_meet(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "time.sleep(7)", nodes=1)
    assert warning_of(tmp_path, "", gang) == ""


def test_a_program_that_starts_its_ranks_is_counted_by_them(tmp_path: Path) -> None:
    gang = make_gang(tmp_path, "print('spawns')", ranks_per_node=1)
    gang = dataclasses.replace(gang, entry=dataclasses.replace(gang.entry, spawns=(4, 4)))
    assert warning_of(tmp_path, "", gang).endswith("each of the 8 ranks may have trained alone")


def test_a_run_that_failed_has_no_second_diagnosis(tmp_path: Path) -> None:
    with running(tmp_path, "sys.exit(3)") as run:
        run.await_end()
        assert (run.end().outcome, run.end().warning) == ("FAILED", "")


@contextmanager
def connection(address: str, family: int = socket.AF_INET) -> Iterator[tuple[socket.socket, socket.socket, int]]:
    with closing(socket.socket(family)) as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        with closing(socket.create_connection(("127.0.0.1", port))) as client, closing(server.accept()[0]) as accepted:
            yield client, accepted, port


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)])
def test_a_connection_is_seen_while_it_lasts_and_after_its_end(address: str, family: int) -> None:
    with connection(address, family) as (_, _, port):
        assert was_connected("127.0.0.1", port)
    assert was_connected("127.0.0.1", port)
    assert was_connected("127.0.0.3", port) is False


def test_a_listener_that_no_client_has_come_to_is_no_connection() -> None:
    # An address of its own: the kernel may give a port again to which another test was connected within the minute.
    with closing(socket.create_server(("127.0.0.9", 0))) as server:
        assert was_connected("127.0.0.9", server.getsockname()[1]) is False


def test_connections_to_a_name_are_not_known() -> None:
    assert was_connected("host0", 29500) is None


def test_status_and_wait_print_the_warning_of_a_run_that_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path))
    attempt = start_attempt(make_run(tmp_path, "brisk-otter-3"))
    write_end(attempt, AttemptEnd(outcome="COMPLETED", reason="", warning="no rank connected to 10.0.0.1:23456"))
    assert main(["status", "brisk-otter-3"]) == 0
    assert "warning: no rank connected to 10.0.0.1:23456" in capfd.readouterr().out
    assert main(["status", "brisk-otter-3", "-o", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["warning"] == "no rank connected to 10.0.0.1:23456"
    assert main(["wait", "brisk-otter-3"]) == 0
    assert "warning: no rank connected to 10.0.0.1:23456" in capfd.readouterr().err
