"""The torch of a Python: what its files say, which is quick, and what comes of importing it, which is certain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.system.devices import read_driver

INSTALL_CUDA = "install torch with CUDA: https://pytorch.org/get-started/locally"
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA -> NVIDIA's oldest driver for it. Source: CUDA Toolkit release notes, minor version compatibility."""
_TORCH_TIMEOUT_S = 40.0
_TORCH_PROBE = """\
import json
found = {}
try:
    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
if "error" not in found:
    try:
        import torchvision
        found["torchvision"] = torchvision.__version__
    except ModuleNotFoundError:
        found["torchvision"] = None
    except Exception as error:
        found["torchvision_error"] = f"{type(error).__name__}: {error}"
print("FOUND" + json.dumps(found))
"""
"""Runs in an interpreter of its own: an import that crashes, or takes a minute, ends only that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What came of importing torch, and torchvision after it; None: not installed, not known."""

    version: str | None = None
    cuda: str | None = None
    gpus: int | None = None
    error: str | None = None
    torchvision: str | None = None
    torchvision_error: str | None = None
    compile_obstacle: str | None = None
    """What torch.compile lacks here for GPUs."""
    driver: str | None = None
    """NVIDIA's, where torch has CUDA and finds no GPU."""


def import_torch() -> Torch:
    """Import torch and torchvision in a process of their own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"the import takes longer than {_TORCH_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Torch(error=f"{sys.executable}: {error.strerror}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    if not lines:
        words = done.stderr.strip().splitlines()
        return Torch(error=words[-1] if words else f"the import ends with exit code {done.returncode}")
    found = json.loads(lines[-1].removeprefix("FOUND"))
    if str(found.get("error", "")).startswith("ModuleNotFoundError: No module named 'torch'"):
        return Torch()
    driver = read_driver(os.environ) if found.get("cuda") and not found.get("gpus") else None
    return Torch(**found, compile_obstacle=find_compile_obstacle(os.environ), driver=driver)


def driver_trouble(cuda: str, driver: str) -> tuple[str, str] | None:
    """Say that a driver is too old for the CUDA that a torch was built for, and what mends it; None when it is not."""
    wants, has = cuda.partition(".")[0], driver.partition(".")[0]
    if not (wants.isdigit() and has.isdigit()) or int(has) >= _MIN_DRIVER.get(int(wants), 0):
        return None
    runs = max((version for version, least in _MIN_DRIVER.items() if least <= int(has)), default=None)
    older = f"a torch for CUDA {runs} or older" if runs else "an older torch"
    return (
        f"which needs NVIDIA's driver {_MIN_DRIVER[int(wants)]} or newer; this host has {driver}",
        f"a newer driver, or {older}: https://pytorch.org/get-started/previous-versions",
    )


def find_compile_obstacle(environ: Mapping[str, str]) -> str | None:
    """Say what torch.compile lacks here to build kernels for GPUs; None when it has what it looks for.

    Triton compiles a piece of C against Python.h. Source: `_build` in triton/runtime/build.py.
    """
    compiler = environ.get("CC") or "gcc"
    if not any(shutil.which(name, path=environ.get("PATH")) for name in (compiler, "clang")):
        return "no C compiler: neither CC nor gcc nor clang"
    include = sysconfig.get_path("include")
    return None if (Path(include) / "Python.h").is_file() else f"no Python.h in {include}"
