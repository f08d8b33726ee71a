"""A Python that has torch and nothing else: what a machine needs that clusterddp reaches by SSH."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def make_bare_python(directory: Path, *, packages: Sequence[str] = ("torch",)) -> Path:
    """Make an environment without pip in which only these packages, and what they require, can be imported.

    The packages are symlinks to those of this Python. Returns the interpreter, `directory/bin/python`.
    """
    for place, package in lay_out(directory, packages).items():
        place.symlink_to(package)
    return directory / "bin" / "python"


def lay_out(directory: Path, packages: Sequence[str] = ("torch",)) -> dict[Path, Path]:
    """Make the same environment without its packages; returns where in it each one belongs -> where it lies."""
    site_packages = directory / "lib" / VERSION / "site-packages"
    site_packages.mkdir(parents=True)
    (directory / "bin").mkdir()
    interpreter = base_interpreter()
    for name in ("python", "python3"):
        (directory / "bin" / name).symlink_to(interpreter)
    (directory / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    return {site_packages / path.name: path for path in find_packages(packages)}


def base_interpreter() -> Path:
    """Return the interpreter that the environment of the tests was made from: no symlink, no shim of pyenv."""
    return Path(sys.base_prefix, "bin", VERSION).resolve()


def find_packages(names: Sequence[str]) -> list[Path]:
    """List what lies in site-packages for these packages and for all that they require on this machine."""
    from packaging.requirements import Requirement  # not needed to start a rack by hand

    found: dict[str, None] = {}
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            top = PurePosixPath(file).parts[0]
            if top not in ("..", "__pycache__") and not top.endswith(".pth"):
                found[str(Path(str(distribution.locate_file(top))))] = None
        requirements = [Requirement(line) for line in distribution.requires or ()]
        waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [Path(path) for path in sorted(found)]
