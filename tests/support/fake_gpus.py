"""GPUs that do not exist: a fake nvidia-smi on PATH lists them, and the processes that are said to compute on them."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

_SCRIPT = """#!/bin/sh
case "$*" in
    -L) /bin/cat '{place}/listing' ;;
    '--query-compute-apps=gpu_uuid,pid --format=csv,noheader') /bin/cat '{place}/apps' ;;
    *) exit 9 ;;
esac
"""


@dataclass
class FakeGpus:
    """GPUs of one test; no other test's have these UUIDs, so tests that run at once do not meet on them."""

    place: Path
    count: int = 2
    slices: int = 0
    """How many MIG slices the first one is cut into."""
    models: tuple[str, ...] = ("NVIDIA H200",)
    uuids: list[str] = field(init=False)
    slice_uuids: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.place.mkdir(exist_ok=True)
        self.uuids = [f"GPU-{uuid.uuid4()}" for _ in range(self.count)]
        self.slice_uuids = [f"MIG-{uuid.uuid4()}" for _ in range(self.slices)]
        lines = [
            f"GPU {index}: {self.models[index % len(self.models)]} (UUID: {name})"
            for index, name in enumerate(self.uuids)
        ]
        lines[1:1] = [f"  MIG 1g.18gb  Device  {n}: (UUID: {name})" for n, name in enumerate(self.slice_uuids)]
        (self.place / "listing").write_text("\n".join(lines) + "\n")
        self.compute({})
        command = self.place / "nvidia-smi"
        command.write_text(_SCRIPT.format(place=self.place))
        command.chmod(0o755)

    @property
    def path(self) -> str:
        """PATH with the fake in front."""
        return f"{self.place}{os.pathsep}{os.environ['PATH']}"

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": self.path}

    def compute(self, pids: dict[int, int | str]) -> None:
        """Let processes compute: index of the GPU -> pid."""
        (self.place / "apps").write_text("".join(f"{self.uuids[index]}, {pid}\n" for index, pid in pids.items()))
