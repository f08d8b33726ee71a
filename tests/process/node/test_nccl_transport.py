"""The transport in NCCL's log reaches `status`; ranks without NCCL print NCCL's lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.cli.text.status import transport_texts
from clusterddp.network.nccl_log import Transport, read_transport
from clusterddp.run.directory import make_attempt_dirs
from clusterddp.run.record import log_event, read_events
from clusterddp.view.events import NodeTransport, find_transports, warn_of_sockets
from clusterddp.view.status import read_status
from tests.support.gang_runs import running
from tests.support.handmade_runs import make_run
from tests.support.waiting import wait_until

IB = """\
gpu01:41231:41231 [0] NCCL INFO Bootstrap : Using ib0:10.1.0.11<0>
gpu01:41231:41231 [0] NCCL INFO cudaDriverVersion 12090
gpu01:41231:41231 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
gpu01:41231:41301 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
gpu01:41231:41301 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =ib0
gpu01:41231:41301 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB ib0:10.1.0.11<0>
gpu01:41231:41301 [0] NCCL INFO Using network IB
gpu01:41231:41301 [0] NCCL INFO comm 0x5581 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
gpu01:41231:41301 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu01:41231:41301 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/1(3)/GDRDMA/Shared
gpu01:41231:41301 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
gpu01:41231:41301 [0] NCCL INFO ncclCommInitRank comm 0x5581 rank 0 nranks 16 cudaDev 0 nvmlDev 0 - Init COMPLETE
"""
SOCKET = """\
[2026-11-25 10:00:00] gpu02:977:1033 [3] NCCL INFO Failed to open libibverbs.so[.1]
gpu02:977:1033 [3] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.12<0> [1]eno2:fe80::1%eno2<0>
gpu02:977:1033 [3] NCCL INFO Using non-device net plugin version 0
gpu02:977:1033 [3] NCCL INFO Using network Socket
gpu02:977:1033 [3] NCCL INFO Channel 00/0 : 3[3] -> 4[4] [send] via NET/Socket/0
gpu02:977:1033 [3] NCCL INFO Channel 00 : 3[3] -> 2[2] via SHM/direct/direct
"""
ROCE = """\
a:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_bond_0:1/RoCE ; OOB bond0:10.0.0.1<0>
a:1:1 [0] NCCL INFO Using network IB
"""
LONG = f"a:1:1 [0] NCCL INFO NET/IB : Using [0]{'x:' * 1_000_000}"
EFA = """\
ip-10-0-0-1:88:99 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
ip-10-0-0-1:88:99 [0] NCCL INFO Using network AWS Libfabric
ip-10-0-0-1:88:99 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
"""
NO_DEVICE = """\
a:1:2 [0] NCCL INFO NET/IB : No device found.
a:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
a:1:2 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            IB,
            Transport(network="IB", devices=("mlx5_0:1/IB", "mlx5_3:1/IB"), links=("NET/IB/GDRDMA", "P2P/CUMEM")),
        ),
        (
            SOCKET,
            Transport(
                network="Socket",
                devices=("eno1", "eno2"),
                links=("NET/Socket", "SHM/direct"),
                complaint="Failed to open libibverbs.so[.1]",
            ),
        ),
        (ROCE, Transport(network="IB", devices=("mlx5_bond_0:1/RoCE",))),
        # To search this line would take minutes.
        (f"{ROCE}{LONG}\n", Transport(network="IB", devices=("mlx5_bond_0:1/RoCE",))),
        (EFA, Transport(network="AWS Libfabric", links=("NET/AWS Libfabric/GDRDMA",))),
        (NO_DEVICE, Transport(network="Socket", devices=("eth0",), complaint="NET/IB : No device found.")),
        (IB[: IB.index("Using network IB")], None),
        ("", None),
        ("\0\xff Using network IB\nvia NET/\n", None),
    ],
    ids=["IB", "sockets", "RoCE", "a long line", "EFA", "no device", "not yet", "nothing", "garbage"],
)
def test_nccl_s_own_lines_are_read(log: str, expected: Transport | None) -> None:
    assert read_transport(log) == expected


PRETEND = """
up()
if run_dir.joinpath("quiet").exists(): sys.exit(0)
with open(os.environ["NCCL_DEBUG_FILE"], "w") as log: log.write(LOGS[rank])
while not run_dir.joinpath("seen").exists(): time.sleep(0.02)
"""


def test_the_transport_of_each_node_is_in_status(tmp_path: Path) -> None:
    program = f"LOGS = {[IB, IB, IB, SOCKET]!r}\n{PRETEND}"
    with running(tmp_path, program, backend="nccl") as gang:
        wait_until(lambda: len(find_transports(read_events(gang.run), 0)) == 2)
        first, second = find_transports(read_events(gang.run), 0)
        (gang.run.path / "seen").touch()
        assert gang.await_end() == [0, 0]
    assert (first.host, first.network, first.devices) == ("host0", "IB", ("mlx5_0:1/IB", "mlx5_3:1/IB"))
    # One rank over sockets is what a node is as slow as; links are those of all its ranks.
    assert (second.host, second.network) == ("host1", "Socket")
    assert second.links == ("NET/IB/GDRDMA", "NET/Socket", "P2P/CUMEM", "SHM/direct")


@pytest.mark.parametrize("place", ["the shell", "the spec"])
def test_a_user_who_sets_nccl_s_log_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    program = "import json\n(run_dir / f'{rank}.json').write_text(json.dumps(dict(os.environ)))\n"
    options = {"env": {"NCCL_DEBUG": "WARN"}} if place == "the spec" else {}
    if place == "the shell":
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with running(tmp_path, program, nodes=1, backend="nccl", **options) as gang:
        gang.await_end()
        environ = json.loads((gang.run.path / "1.json").read_text())
    found = {name: value for name, value in environ.items() if name.startswith("NCCL_DEBUG")}
    assert found == {"NCCL_DEBUG": "WARN"}


def test_gangs_without_gpus_have_no_log_of_nccl(tmp_path: Path) -> None:
    program = "import json\n(run_dir / f'{rank}.json').write_text(json.dumps(dict(os.environ)))\n"
    with running(tmp_path, program, nodes=1) as gang:
        gang.await_end()
        assert "NCCL_DEBUG" not in json.loads((gang.run.path / "1.json").read_text())


def transport_of(**changes: object) -> NodeTransport:
    values = {"node_rank": 0, "host": "gpu01", "network": "IB", "devices": (), "links": (), "complaint": ""}
    return NodeTransport(**(values | changes))


def test_sockets_between_hosts_are_warned_of_with_nccl_s_reason() -> None:
    sockets = transport_of(
        host="gpu02", node_rank=1, network="Socket", devices=("eno1",), complaint="NET/IB : No device found."
    )
    warning = warn_of_sockets([transport_of(), sockets])
    assert warning.startswith("between hosts NCCL sends over sockets, by eno1, not by RDMA (NET/IB : No device found).")
    assert warn_of_sockets([sockets]) == ""
    assert warn_of_sockets([transport_of(), transport_of(host="gpu02", node_rank=1)]) == ""
    assert warn_of_sockets([]) == ""


def test_status_has_it_in_json_and_as_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    make_attempt_dirs(run.attempt(0))
    for node_rank, network in enumerate(("IB", "Socket")):
        facts = {"devices": ["x"], "links": ["NET/x"], "complaint": ""}
        where = {"attempt": 0, "node_rank": node_rank, "host": f"gpu0{node_rank}"}
        log_event(run, "nccl_transport", **where, network="Socket", **facts)
        log_event(run, "nccl_transport", **where, network=network, **facts)
    log_event(run, "nccl_transport", attempt=0, node_rank="x", host=7)
    status = read_status(run)
    shown = status.to_json()
    assert [(each["node_rank"], each["network"], each["devices"]) for each in shown["nccl"]] == [
        (0, "IB", ("x",)),
        (1, "Socket", ("x",)),
    ]
    assert "NCCL sends over sockets, by x" in shown["warning"]
    assert transport_texts(status.transports) == [
        "gpu00: network IB (x), by NET/x",
        "gpu01: network Socket (x), by NET/x",
    ]
