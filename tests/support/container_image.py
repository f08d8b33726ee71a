"""A container's image without a registry: a directory with what this machine's Python needs, to be run by apptainer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.bare_python import base_interpreter

TOOLS = ("/bin/sh", "/usr/bin/env")
PLACES = ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr/bin", "var/tmp")


def make_image(directory: Path) -> list[str]:
    """Fill a directory with a file system that has a shell and the libraries of this Python.

    Return what to mount: where Python and its packages lie.
    """
    prefix = base_interpreter().parent.parent
    for place in PLACES:
        (directory / place).mkdir(parents=True)
    for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
        (directory / name).symlink_to(target)
    libraries = [
        *prefix.glob("lib/python3*/lib-dynload/*.so"),
        *Path(sys.prefix).glob("lib/*/site-packages/torch/lib/*.so"),
    ]
    for file in {*map(Path, TOOLS), base_interpreter(), *libraries}:
        for library in find_libraries(file):
            place = directory / "usr" / library.relative_to("/usr" if library.is_relative_to("/usr") else "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                shutil.copy(library, place)
    for tool in TOOLS:
        shutil.copy(tool, directory / "usr/bin")
    (directory / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (directory / "etc/group").write_text("root:x:0:\n")
    return [str(prefix), sys.prefix]


def find_libraries(file: Path) -> list[Path]:
    """List the system's libraries that a program loads."""
    words = subprocess.run(["ldd", str(file)], check=False, capture_output=True, text=True).stdout.split()
    return [Path(word) for word in words if word.startswith(("/lib", "/usr/lib"))]
