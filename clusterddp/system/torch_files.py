"""Find a package and read torch's version and CUDA version from its files, without importing it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_NAMES = ("__version__", "cuda", "hip")
_VALUE = r"^{name}\b[^=\n]*=\s*'([^']+)'"


def find_package(name: str) -> Path | None:
    """Find the directory of a package; None if it is not installed, or was partly removed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def read_torch_values(torch: Path | None) -> dict[str, str]:
    """Read `__version__`, `cuda` and `hip` of `torch.version` from torch's directory; a CPU build has only the first.

    Values that cannot be read are left out. The version of pip may be shorter: 2.13.0 in place of 2.13.0+cu130.
    """
    if torch is None:
        return {}
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    matches = {name: re.search(_VALUE.format(name=name), text, re.MULTILINE) for name in _NAMES}
    return {name: match[1] for name, match in matches.items() if match}
