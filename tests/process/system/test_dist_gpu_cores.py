"""Ranks keep to the cores near their GPUs. No GPU is here: the driver's and the kernel's files are made by hand."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clusterddp.node import local_ranks, rank_starter
from clusterddp.node.rank_starter import Launch, Update
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.system.gpu_cores import cores_for_ranks, read_cores, spell_cores
from tests.support.single_ranks import run_rank, write_script

ALL = frozenset(range(16))
TWO_SOCKETS = {"0000:17:00.0": "0-3,8-11", "0000:65:00.0": "4-7,12-15"}


def host(directory: Path, near: dict[str, str]) -> dict[str, Path]:
    """Write what a host with these GPUs reports; their UUIDs are GPU-0000:17:00.0 and so on."""
    for address, cores in near.items():
        (directory / "gpus" / address).mkdir(parents=True)
        information = f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 220\nGPU UUID: \t GPU-{address}\nDevice Minor: \t 0\n"
        (directory / "gpus" / address / "information").write_text(information)
        (directory / "devices" / address).mkdir(parents=True)
        (directory / "devices" / address / "local_cpulist").write_text(f"{cores}\n")
    return {"driver": directory / "gpus", "devices": directory / "devices"}


@pytest.mark.parametrize(
    ("gpus", "allowed", "expected"),
    [
        (("0", "1"), ALL, ["0-3,8-11", "4-7,12-15"]),
        (("1", "0"), ALL, ["4-7,12-15", "0-3,8-11"]),
        (("GPU-0000:65:00.0",), ALL, [None]),
        (("GPU-0000:65:00.0", "0"), ALL, ["4-7,12-15", "0-3,8-11"]),
        (("0", "1"), frozenset(range(8)), ["0-3", "4-7"]),
        (("0", "1"), frozenset({0, 1, 2, 3}), [None, None]),
        (("0", "1"), frozenset({0, 1, 2, 4}), [None, None]),
        (("MIG-7a", "1"), ALL, [None, None]),
        (("0", "5"), ALL, [None, None]),
    ],
    ids=[
        "by index", "in another order", "half of the cores for the only rank", "by UUID", "a cpuset over both sockets",
        "a cpuset of one socket", "a cpuset that is short of one", "a slice", "a GPU that is not there",
    ],
)  # fmt: skip
def test_ranks_get_the_allowed_cores_near_their_gpu(
    tmp_path: Path, gpus: tuple[str, ...], allowed: frozenset[int], expected: list[str | None]
) -> None:
    assert cores_for_ranks(gpus, allowed, **host(tmp_path, TWO_SOCKETS)) == expected


def test_hosts_without_a_driver_or_with_one_node_of_memory_stay_as_they_are(tmp_path: Path) -> None:
    assert cores_for_ranks(("0",), ALL, driver=tmp_path / "none", devices=tmp_path) == [None]
    one = host(tmp_path, dict.fromkeys(TWO_SOCKETS, "0-15"))
    assert cores_for_ranks(("0", "1"), ALL, **one) == [None, None]


def test_a_list_of_cores_that_is_nonsense_is_no_list(tmp_path: Path) -> None:
    assert cores_for_ranks(("0",), ALL, **host(tmp_path, {"0000:17:00.0": "some"})) == [None]


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8,10-11"])
def test_lists_of_cores_are_written_as_they_are_read(text: str) -> None:
    assert spell_cores(read_cores(text)) == text


class Recorder:
    """A rank starter that starts nothing."""

    owns_descendants = False

    def __init__(self) -> None:
        self.launches: dict[int, Launch] = {}

    def start(self, launches: dict[int, Launch]) -> None:
        self.launches = launches

    def updates(self) -> list[Update]:
        return []


@pytest.mark.parametrize(
    ("gpus", "changes", "expected"),
    [
        (("0", "1"), {}, True),
        ((), {}, False),
        (("0",), {}, False),
        (("0", "1"), {"env": {"CUDA_VISIBLE_DEVICES": "1,0"}}, False),
        (("0", "1"), {"slurm_chooses_gpus": True}, False),
    ],
    ids=["a GPU each", "on the CPU", "fewer GPUs than ranks", "the user's own choice", "Slurm has given cores"],
)
def test_a_node_sets_the_cores_of_its_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    changes: dict[str, Any],
    expected: bool,
) -> None:
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        pytest.skip("one core has no halves")
    halves = [spell_cores(frozenset(half)) for half in (own[::2], own[1::2])]
    files = host(tmp_path, dict(zip(TWO_SOCKETS, halves, strict=True)))
    monkeypatch.setattr(rank_starter, "cores_for_ranks", partial(cores_for_ranks, **files))
    node = Node(node_rank=0, host="here", ranks=(0, 1), gpus=gpus, slurm_chooses_gpus="slurm_chooses_gpus" in changes)
    gang = Gang(
        run="x", token="t0ken", nodes=(node,), entry=Entry(kind="script", target="t.py", working_dir="/"),
        threads_per_rank=1, backend="gloo", master_addr="127.0.0.1", env=changes.get("env", {}),
    )  # fmt: skip
    run, starter = RunDir(tmp_path / "run"), Recorder()
    run.path.mkdir()
    own_ranks = local_ranks.LocalRanks(
        run, gang, node, first_attempt=0, starter=starter, report=lambda report: None, spared=frozenset
    )
    own_ranks.obey({"kind": "start", "attempt": 0, "restart": 0, "master_port": 1, "networks": ()}, 0.0)
    cores = [launch.values().get("CLUSTERDDP_CORES") for launch in starter.launches.values()]
    assert cores == (halves if expected else [None, None])


def test_a_rank_and_what_it_starts_keep_to_its_cores(tmp_path: Path) -> None:
    program = (
        "import json, os, subprocess\n"
        "child = subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout\n"
        "print(json.dumps([sorted(os.sched_getaffinity(0)), child, os.environ.get('CLUSTERDDP_CORES')]))\n"
    )
    core = max(os.sched_getaffinity(0))
    script = write_script(tmp_path, program)
    _, out, err = run_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_CORES=str(core))
    kept, child, variable = json.loads(out)
    assert (kept, variable) == ([core], None), err
    assert f"Cpus_allowed_list:\t{core}\n" in child


def test_cores_that_are_not_there_are_not_kept_to(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os\nprint(len(os.sched_getaffinity(0)))\n")
    code, out, err = run_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_CORES="4000-4001")
    assert (code, out) == (0, f"{len(os.sched_getaffinity(0))}\n"), err
