"""What is installed for a Python, told by itself without importing torch: `python -m clusterddp.facts.packages`.

A process of its own, for what the ranks of a run can import depends on how their Python is started: the agent that
asks here runs isolated, without PYTHONPATH and the user's own site-packages.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.facts.torch import find_compile_obstacle
from clusterddp.system.torch_files import find_package, read_torch_values
from clusterddp.wire import build, read_object

_TIMEOUT_S = 20.0
"""For a Python on a slow file server that nobody has started today."""
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """What concerns a run among the packages of a Python; None: not installed, or not told."""

    python: str
    executable: str
    torch: str | None = None
    torch_dir: str | None = None
    cuda: str | None = None
    """What torch was built for."""
    nccl: str | None = None
    torchvision: str | None = None
    compile_obstacle: str | None = None
    """What torch.compile lacks for GPUs."""
    pip: bool = True
    """It has pip."""
    error: str | None = None
    """Why it could not be told."""


def ask_packages(executable: str, environ: Mapping[str, str], working_dir: Path) -> Packages:
    """Ask a Python, started with this environment, what it can import; `environ` leads it to this package."""
    unknown = Packages(python="", executable=executable)
    try:
        done = subprocess.run(
            [executable, "-m", "clusterddp.facts.packages"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=dict(environ),
            cwd=working_dir,
            check=False,
        )
        return build(Packages, read_object(done.stdout.rpartition("FOUND ")[2]))
    except subprocess.TimeoutExpired:
        return dataclasses.replace(unknown, error=f"it takes longer than {_TIMEOUT_S:.0f} s to start")
    except OSError as error:
        return dataclasses.replace(unknown, error=error.strerror or str(error))
    except ValueError:
        words = done.stderr.strip().splitlines()
        return dataclasses.replace(unknown, error=words[-1] if words else f"it ends with exit code {done.returncode}")


def read_packages() -> Packages:
    """Look at what this very process could import."""
    place = find_package("torch")
    values = read_torch_values(place)
    return Packages(
        python=sys.version.split()[0],
        executable=sys.executable,
        torch=(values.get("__version__") or _version("torch") or "of unknown version") if place else None,
        torch_dir=str(place) if place else None,
        cuda=values.get("cuda"),
        nccl=next((version for name in _NCCL if (version := _version(name))), None) if place else None,
        torchvision=_version("torchvision"),
        compile_obstacle=find_compile_obstacle(os.environ),
        pip=importlib.util.find_spec("pip") is not None,
    )


def _version(name: str) -> str | None:
    import importlib.metadata  # takes longer than all else here, which every host imports

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]  # `-m` has put it there
    print("FOUND " + json.dumps(dataclasses.asdict(read_packages())))
