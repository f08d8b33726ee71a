"""What is left of a rack on this machine: its processes, mounts, cgroups and directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.testbed.files import FREEZER

NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")


def namespaces(process: Path) -> set[str]:
    return {str((process / "ns" / kind).readlink()) for kind in NAMESPACES}


def find_traces(pids: list[int], directory: Path) -> Callable[[], list[str]]:
    """Note the namespaces of living hosts; the result looks for whatever is left of them and of their directory."""
    spaces = {link for pid in pids for link in namespaces(Path("/proc", str(pid)))}

    def find() -> list[str]:
        found = [str(each) for each in (directory, FREEZER / directory.name) if each.exists()]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if spaces & namespaces(process):
                    found.append(f"process {process.name}")
                found += [line for line in (process / "mountinfo").read_text().splitlines() if f"{directory}/" in line]
                if f"{directory}\0".encode() in (process / "cmdline").read_bytes():
                    found.append(f"process {process.name}")
            except OSError:  # it ended while we looked
                continue
        return found

    return find


def init_pids(rack_dir: Path) -> list[int]:
    return [int(path.read_text()) for path in (rack_dir / "pid").iterdir()]


def own_interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))
