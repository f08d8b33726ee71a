"""Find the cores near a GPU of this host: those of its NUMA node, as the kernel lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/sys/bus/pci/devices")


def cores_for_ranks(
    gpus: Sequence[str], allowed: frozenset[int], *, driver: Path = DRIVER, devices: Path = DEVICES
) -> list[str | None]:
    """Return for each rank the cores near its GPU, such as 0-31,64-95; None: it may use all allowed cores.

    `gpus`: the GPU of each rank, as CUDA_VISIBLE_DEVICES names it. If fewer allowed cores are near a GPU than a rank's
    share, all ranks get None: the user or the scheduler has chosen the cores in another way.
    """
    addresses = _addresses(driver)
    near = [_near(addresses.get(gpu.lower()), devices) & allowed for gpu in gpus]
    share = max(1, len(allowed) // max(1, len(gpus)))
    if any(len(cores) < share for cores in near):
        return [None] * len(gpus)
    return [None if cores == allowed else spell_cores(cores) for cores in near]


def read_cores(text: str) -> frozenset[int]:
    """Read a list of cores in the kernel's format, 0-3,8.

    Raises: ValueError: it is no such list.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def spell_cores(cores: frozenset[int]) -> str:
    """Write a list of cores in the kernel's format."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def _addresses(driver: Path) -> dict[str, str]:
    """Return the PCI address of each GPU, by its index (in the order of the addresses) and by its UUID."""
    found: dict[str, str] = {}
    try:
        folders = sorted(folder.name for folder in driver.iterdir())
    except OSError:
        return found
    for index, address in enumerate(folders):
        found[str(index)] = address
        try:
            information = (driver / address / "information").read_text(errors="replace")
        except OSError:
            continue
        if uuid := re.search(r"^GPU UUID:\s*(\S+)", information, re.MULTILINE):
            found[uuid[1].lower()] = address
    return found


def _near(address: str | None, devices: Path) -> frozenset[int]:
    try:
        return read_cores((devices / address / "local_cpulist").read_text()) if address else frozenset()
    except (OSError, ValueError):
        return frozenset()
