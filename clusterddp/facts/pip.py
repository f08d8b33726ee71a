"""The command that puts a certain torch into a certain Python."""

from __future__ import annotations

import re
import shlex

from clusterddp.facts.packages import Packages

_INDEX = "https://download.pytorch.org/whl"


def install_command(packages: Packages, torch: str | None) -> str:
    """Return the command that installs this version of torch (`2.10.0+cu128`; None: any) for that very Python."""
    python = shlex.quote(packages.executable)
    installer = f"{python} -m pip install" if packages.pip else f"uv pip install --python {python}"
    release, _, build = (torch or "").partition("+")
    if not re.fullmatch(r"[0-9.]+(?:(?:a|b|rc|\.dev|\.post)[0-9]+)*", release):
        return f"{installer} torch"
    # The index has builds of each version under the name of what they were built for.
    index = f" --index-url {_INDEX}/{build}" if re.fullmatch(r"cu[0-9]+|cpu|rocm[0-9.]+|xpu", build) else ""
    return f"{installer} torch=={release}{index}"
