"""When a gang cannot be complete, every rank ends in time, and the error names the machine and the value.

The ranks are started by hand on the hosts of a rack, as people do who have no launcher.
"""

from __future__ import annotations

import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.support.paths import ROOT
from tests.support.worker_ranks import Ended, Place, wait_for, worker
from tests.testbed.network import block_ports, open_ports
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
PORT = "29511"


@dataclass
class Hosts:
    """A directory that the hosts of a rack share, and ranks started on them by hand."""

    rack: Rack
    place: Place

    def start(self, host: str, rank: int, *arguments: str, world_size: int = 3, **environ: str) -> Popen[str]:
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "node1", "MASTER_PORT": PORT}
        variables |= {"PYTHONPATH": str(ROOT), **environ}
        argv = self.rack.argv(host, worker(*arguments), cwd=self.place.path, env=variables)
        return Popen(argv, stdout=PIPE, stderr=PIPE, text=True)

    def fail(self, *processes: Popen[str]) -> list[str]:
        """Wait until all of them have failed; return the standard error of each."""
        ended: list[Ended] = wait_for(processes)
        assert [each.code for each in ended] == [3] * len(ended), [each.err for each in ended]
        assert list(self.place.path.glob("report-*")) == []
        return [each.err for each in ended]


@pytest.fixture
def gang(hosts: Rack) -> Iterator[Hosts]:
    directory = hosts.dir / "shared" / uuid.uuid4().hex
    directory.mkdir(parents=True)
    yield Hosts(hosts, Place(directory, start_timeout="0:30").write())
    shutil.rmtree(directory)


def test_three_hosts_meet(gang: Hosts) -> None:
    ended = wait_for([gang.start(f"node{rank + 1}", rank) for rank in (2, 0, 1)])
    assert [each.code for each in ended] == [0, 0, 0], ended[0].err
    assert gang.place.values("GROUP_RANK") == ["0", "1", "2"]
    assert gang.place.values("interface") == ["eth0"] * 3


def test_a_missing_machine_is_named_by_its_rank_to_all(gang: Hosts) -> None:
    for words in gang.fail(gang.start("node1", 0), gang.start("node2", 1)):
        assert "rank 2 of 3 did not connect to node1, port 29511, within 30 s" in words
        assert "here: rank 0 on node1; rank 1 on node2" in words


def test_a_rank_that_was_started_twice_is_named_with_both_machines(gang: Hosts) -> None:
    errors = gang.fail(gang.start("node1", 0), gang.start("node2", 1), gang.start("node3", 1))
    for words in errors:
        assert "rank 1 was started twice" in words
        assert "node2" in words
        assert "node3" in words


def test_a_second_rank_0_on_another_machine_is_found(gang: Hosts) -> None:
    for words in gang.fail(gang.start("node1", 0), gang.start("node2", 0)):
        assert "rank 0 was started twice: on node1" in words


def test_a_second_rank_0_on_the_same_machine_is_found(gang: Hosts) -> None:
    for words in gang.fail(gang.start("node1", 0), gang.start("node1", 0)):
        assert "rank 0 was started twice: on node1" in words


def test_another_world_size_is_named_with_its_machine(gang: Hosts) -> None:
    errors = gang.fail(gang.start("node1", 0), gang.start("node2", 1, world_size=4), gang.start("node3", 2))
    for words in errors:
        assert "rank 1 on node2 was started for 4 ranks (WORLD_SIZE), rank 0 on node1 for 3" in words


def test_another_spec_is_named_with_its_machine(gang: Hosts) -> None:
    errors = gang.fail(gang.start("node1", 0), gang.start("node2", 1), gang.start("node3", 2, "restarts=1"))
    for words in errors:
        assert "rank 2 on node3 reads another spec than rank 0 on node1" in words


def test_another_torch_is_named_with_its_machine(gang: Hosts) -> None:
    metadata = gang.place.path / "older" / "torch-1.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.0\n")
    older = {"PYTHONPATH": f"{metadata.parents[1]}:{ROOT}"}
    errors = gang.fail(gang.start("node1", 0), gang.start("node2", 1, **older), gang.start("node3", 2))
    for words in errors:
        assert "rank 1 on node2 has torch 1.13.0, rank 0 on node1 has torch" in words


def test_a_wrong_address_is_named_with_its_variable(gang: Hosts) -> None:
    wrong = gang.fail(gang.start("node1", 0), gang.start("node2", 1), gang.start("node3", 2, MASTER_ADDR="10.77.0.99"))
    assert "rank 2 of 3 did not connect to node1" in wrong[0]
    assert "rank 2 on node3 did not reach rank 0 at 10.77.0.99 (from MASTER_ADDR), port 29511" in wrong[2]


def test_an_address_where_rank_0_is_not_is_named_by_all(gang: Hosts) -> None:
    elsewhere = {"MASTER_ADDR": "node3"}
    errors = gang.fail(
        gang.start("node1", 0, world_size=2, **elsewhere), gang.start("node2", 1, world_size=2, **elsewhere)
    )
    assert "node3 (from MASTER_ADDR) is not an address of node1, where rank 0 is" in errors[0]
    assert "rank 1 on node2 did not reach rank 0 at node3" in errors[1]


def test_a_closed_port_is_named_with_its_machine(gang: Hosts) -> None:
    block_ports(gang.rack, "node1", PORT)
    try:
        errors = gang.fail(gang.start("node1", 0, world_size=2), gang.start("node2", 1, world_size=2))
    finally:
        open_ports(gang.rack, "node1")
    assert "rank 1 of 2 did not connect to node1, port 29511" in errors[0]
    assert "did not reach rank 0 at node1 (from MASTER_ADDR), port 29511 (from MASTER_PORT)" in errors[1]
    assert "no answer" in errors[1]


def test_a_port_that_another_program_has_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path, start_timeout="0:20").write()
    with socket.create_server(("", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        (ended,) = place.by_hand([0], 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert ended.code == 3
    assert f"port {port} (from MASTER_PORT) is in use by another program" in ended.err


def test_a_stranger_that_connects_is_no_rank(tmp_path: Path) -> None:
    place = Place(tmp_path).write()
    port = "29513"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = place.start(*worker(), RANK="0", **variables)
    connect = f"import socket, time\nwhile True:\n    try:\n        socket.create_connection(('127.0.0.1', {port})).sendall(b'GET /\\n')\n        break\n    except OSError:\n        time.sleep(0.1)\n"  # noqa: E501
    assert place.run(sys.executable, "-c", connect).returncode == 0
    assert [ended.code for ended in wait_for([first, place.start(*worker(), RANK="1", **variables)])] == [0, 0]
