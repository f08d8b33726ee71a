"""No other user takes the port at which ranks meet: not while it is held, nor between that and torch's store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clusterddp
from clusterddp.network.port import hold_port, reserve_port
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry
from tests.support.gang_runs import GangRun, make_gang, running, started
from tests.support.port_thief import MEET, STEAL, steal
from tests.support.waiting import wait_until
from tests.support.worker_ranks import Place

pytestmark = pytest.mark.root
AGAIN = """
meet(init_method=os.environ["CLUSTERDDP_INIT_METHOD"], rank=rank, world_size=2, group_name="again")
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
meet(store=dist.TCPStore(host, port, 2, rank == 0), rank=rank, world_size=2)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    return tmp_path


def stolen(gang: GangRun) -> str:
    assert gang.await_end(60) == [0] * len(gang.gang.nodes), gang.logs() + gang.attempt().stderr(0).read_text()
    return (gang.run.path / "stolen").read_text()


def test_another_user_cannot_listen_on_a_port_that_is_reserved_or_named() -> None:
    reserved, port = reserve_port("theft", listening=True)
    with reserved:
        assert steal(port) == ""
    with hold_port(port, listening=True):
        assert steal(port) == ""


def test_forked_ranks_meet_at_a_port_that_another_user_wants(tmp_path: Path) -> None:
    with started(tmp_path, make_gang(tmp_path, STEAL + MEET, nodes=1)) as gang:
        assert stolen(gang) == ""
        assert "import_s" in json.loads(gang.attempt().start.read_text())["nodes"][0]


def test_ranks_that_were_started_apart_meet_at_a_port_that_another_user_wants(tmp_path: Path) -> None:
    with started(tmp_path, make_gang(tmp_path, STEAL + MEET, ranks_per_node=1)) as gang:
        assert stolen(gang) == ""


def test_a_program_may_meet_twice_and_by_a_store_of_its_own(tmp_path: Path) -> None:
    with started(tmp_path, make_gang(tmp_path, STEAL + MEET + AGAIN, ranks_per_node=1)) as gang:
        assert stolen(gang) == ""


def test_a_named_port_serves_the_store_of_every_attempt(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if attempt == 0: os._exit(rank)
dist.destroy_process_group()
"""
    with running(tmp_path, program, ranks_per_node=1, restarts=1, master_port=18735) as gang:
        assert gang.await_end(60) == [0, 0], gang.end()
        assert [gang.end(number).outcome for number in (0, 1)] == ["FAILED", "COMPLETED"]


def test_a_command_binds_the_port_itself(tmp_path: Path) -> None:
    command = Entry(
        kind="command", target=sys.executable, args=(str(tmp_path / "program.py"),), working_dir=str(tmp_path)
    )
    program = "let_steal = print\n" + MEET
    with started(tmp_path, make_gang(tmp_path, program, ranks_per_node=1, entry=command)) as gang:
        assert gang.await_end(60) == [0, 0], gang.attempt().stderr(0).read_text()


def test_a_socket_that_a_script_binds_to_the_port_takes_it_over(tmp_path: Path) -> None:
    program = """
import socket, time
port = int(os.environ['MASTER_PORT'])
if rank == 0:
    with socket.create_server(('', port)) as server:
        assert server.accept()[0].recv(1) == b'x'
else:
    socket.create_connection(('127.0.0.1', port)).sendall(b'x')
"""
    with running(tmp_path, program, ranks_per_node=1) as gang:
        assert gang.await_end(60) == [0, 0], gang.attempt().stderr(0).read_text()


def test_a_script_that_binds_the_port_in_another_way_gets_a_hint(tmp_path: Path) -> None:
    # As a library in C does: this is what Python's own socket is made of.
    program = "import _socket\nif rank == 0: _socket.socket().bind(('', int(os.environ['MASTER_PORT'])))\n"
    with running(tmp_path, program, ranks_per_node=1) as gang:
        assert gang.await_end() == [1, 1]
        assert "entry.command" in gang.attempt().stderr(0).read_text()


def test_the_trainer_meets_at_a_port_that_another_user_wants(here: Path) -> None:
    train = "{dataset: shapes, samples: 64, model: fastnet, width: 0.125, epochs: 1, batch_size: 16}"
    run = clusterddp.submit(f"name: job\ndevice: cpu\nresources: {{procs_per_node: 2}}\ntrain: {train}\n")
    assert steal(_master_port(run)) == ""
    assert run.wait(timeout_s=240) == "COMPLETED"


def test_ranks_that_another_launcher_starts_meet_at_a_port_that_another_user_wants(tmp_path: Path) -> None:
    place = Place(tmp_path).write(STEAL + MEET, "device: cpu")
    ended = place.by_hand([0, 1], 2)
    assert [each.code for each in ended] == [0, 0], ended
    assert (place.only_run.path / "stolen").read_text() == ""


def _master_port(run: clusterddp.Run) -> int:
    """Wait until the head has chosen the port."""
    events = RunDir(run.path).events
    wait_until(lambda: events.exists() and "attempt_started" in events.read_text(), 60)
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    return next(int(row["master_port"]) for row in rows if row["event"] == "attempt_started")
