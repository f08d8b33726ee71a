"""File systems of a test's own that run full, turn read-only, have no hard links, or are away for a while."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

_TOOLS = {"ext4": "mkfs.ext4", "exfat": "mount.exfat-fuse"}
_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system in a file, mounted."""

    path: Path
    device: str

    def fill(self) -> Path:
        """Leave no room; return the file that takes it."""
        filler = self.path / "filler"
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(b"x" * size):
                    pass
        return filler

    def make_read_only(self) -> None:
        """Have ext4 do what it does after an error of the device: files that are open cannot be written, either."""
        with contextlib.suppress(OSError):
            Path(f"/sys/fs/ext4/{Path(self.device).name}/trigger_fs_error").write_text("a test")


@contextlib.contextmanager
def disk(place: Path, kind: str = "ext4", *, size: str = "8M") -> Iterator[Disk]:
    """Mount a file system at `place`; exfat is the FUSE one, which has no hard links."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if shutil.which(_TOOLS[kind], path=_SBIN) is None:
        pytest.skip(f"needs {_TOOLS[kind]}; hint: tests/testbed/install")
    image = place.with_name(f"{place.name}.img")
    place.mkdir(parents=True, exist_ok=True)
    _run("truncate", "-s", size, str(image))
    make = ["mkfs.ext4", "-q", "-m", "0"] if kind == "ext4" else ["mkfs.exfat"]
    _run(*make, str(image))
    device = _run("losetup", "-f", "--show", str(image)).strip()
    try:
        mount = ["mount", "-o", "errors=remount-ro"] if kind == "ext4" else ["mount.exfat-fuse"]
        if _try(*mount, device, str(place)) != 0:
            pytest.skip(f"{kind} cannot be mounted here")
        yield Disk(place, device)
    finally:
        _try("umount", "-l", str(place))
        _try("losetup", "-d", device)
        image.unlink(missing_ok=True)


@contextlib.contextmanager
def shared_disk(rack: Rack, place: Path, *, at: Path | None = None, hosts: Sequence[str] = ()) -> Iterator[Disk]:
    """Mount a file system here, and on hosts of a rack, by default on all; `at`: its place there, if it is another."""
    hosts = hosts or (HEAD, *rack.plan.nodes)
    with disk(place) as disk_:
        for host in hosts:
            rack.run(host, ["mkdir", "-p", str(at or place)])
            rack.run(host, ["mount", disk_.device, str(at or place)])
        try:
            yield disk_
        finally:
            for host in hosts:
                rack.run(host, ["umount", "-l", str(at or place)], check=False)


@contextlib.contextmanager
def hung(place: Path) -> Iterator[None]:
    """Let a directory be a mount that does not answer: what asks it waits until the end, and gets an error then."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("mounting needs root and /dev/fuse")
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    try:
        argv = ["mount", "-i", "-t", "fuse", "-o", options, "hung", str(place)]
        subprocess.run(argv, check=True, pass_fds=[device], env={"PATH": _SBIN})
        yield
    finally:
        os.close(device)
        _try("umount", "-l", str(place))


@contextlib.contextmanager
def away(place: Path) -> Iterator[Path]:
    """Let a directory be at its place no more, as when its mount is gone; open files stay open. Yield where it is."""
    elsewhere = place.with_name(f"{place.name}.away")
    place.rename(elsewhere)
    try:
        yield elsewhere
    finally:
        elsewhere.rename(place)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, env={"PATH": _SBIN}).stdout


def _try(*argv: str) -> int:
    return subprocess.run(argv, check=False, capture_output=True, env={"PATH": _SBIN}).returncode
