"""GPUs of private hosts, as far as nvidia-smi reports them: a fake, since the machine of the tests has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.testbed.plan import BARE, TOOLS
from tests.testbed.rack import Rack

STATE = Path("/var/lib/rack-gpus.json")
"""On the host: what its nvidia-smi reports. Any test may write it."""
COMMAND = Path(__file__).with_name("nvidia_smi.py")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi reports it."""

    index: int
    uuid: str
    name: str = "NVIDIA H200"
    memory_mb: int = 143_771
    driver: str = "570.133.20"
    apps: tuple[int, ...] = ()
    """The processes that use it, by their numbers on the host."""


def fit_gpus(rack: Rack, node: str, count: int) -> list[Gpu]:
    """Give a private host an nvidia-smi that lists `count` idle GPUs; their UUIDs are those of this host alone."""
    number = list(rack.plan.nodes).index(node)
    gpus = [Gpu(index=index, uuid=f"GPU-{number:08x}-0000-0000-0000-{index:012x}") for index in range(count)]
    write_gpus(rack, node, gpus)
    command = rack.outside(node, TOOLS / "nvidia-smi")
    command.write_text(f"#!{BARE}/bin/python -IS\n{COMMAND.read_text()}")
    command.chmod(0o755)
    return gpus


def write_gpus(rack: Rack, node: str, gpus: Sequence[Gpu]) -> None:
    """Write what a host's nvidia-smi reports."""
    rack.outside(node, STATE).write_text(json.dumps([asdict(gpu) for gpu in gpus]))


def read_gpus(rack: Rack, node: str) -> list[Gpu]:
    """Read what a host's nvidia-smi reports."""
    rows = json.loads(rack.outside(node, STATE).read_text())
    return [Gpu(**{**row, "apps": tuple(row["apps"])}) for row in rows]


def occupy_gpu(rack: Rack, node: str, index: int, *pids: int) -> None:
    """Let nvidia-smi name these processes of the host (none: no process) as the users of a GPU."""
    gpus = [replace(gpu, apps=pids) if gpu.index == index else gpu for gpu in read_gpus(rack, node)]
    write_gpus(rack, node, gpus)


def break_nvidia_smi(rack: Rack, node: str) -> None:
    """Let nvidia-smi fail, as it does when the driver and its library are of different versions."""
    rack.outside(node, STATE).write_text("broken")


def remove_gpus(rack: Rack, node: str) -> None:
    """Take nvidia-smi away."""
    rack.outside(node, TOOLS / "nvidia-smi").unlink(missing_ok=True)
