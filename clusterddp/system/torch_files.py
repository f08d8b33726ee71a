"""What the files of a package say without importing it: where it lies, and torch's version and CUDA."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_NAMES = ("__version__", "cuda", "hip")
_VALUE = r"^{name}\b[^=\n]*=\s*'([^']+)'"


def find_package(name: str) -> Path | None:
    """Find the directory of a package; a half removed one, without its first file, is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def read_torch_values(torch: Path | None) -> dict[str, str]:
    """Read from torch's directory what `torch.version` has for `__version__`, `cuda` and `hip`.

    Neither `cuda` nor `hip`: a build for CPUs.

    What cannot be read is left out. The version that pip knows may be less: 2.13.0 where this is 2.13.0+cu130.
    """
    if torch is None:
        return {}
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    matches = {name: re.search(_VALUE.format(name=name), text, re.MULTILINE) for name in _NAMES}
    return {name: match[1] for name, match in matches.items() if match}
