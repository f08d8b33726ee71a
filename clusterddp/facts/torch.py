"""The torch of a Python: read from its files, which is quick, or by importing it, which is certain."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clusterddp
from clusterddp.system.devices import read_driver
from clusterddp.system.python import OLDEST_PYTHON, code_command, module_command
from clusterddp.system.torch_files import find_package, read_torch_values
from clusterddp.wire import build, read_object

INSTALL_CUDA = "install torch with CUDA: https://pytorch.org/get-started/locally"
UNKNOWN_VERSION = "of unknown version"
"""For a torch whose files have no version."""
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA -> NVIDIA's oldest driver for it. Source: CUDA Toolkit release notes, minor version compatibility."""
_INDEX = "https://download.pytorch.org/whl"
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_IMPORT_TIMEOUT_S = 40.0
_START_TIMEOUT_S = 20.0
"""For a Python on a slow file server without a cache."""
_IMPORT = """\
import json
found = {}
try:
    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    found["hip"] = getattr(torch.version, "hip", None)
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
"""Runs in a process of its own: an import may crash or hang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """The torch and torchvision of one Python; None: not installed, or not known."""

    executable: str = sys.executable
    """The Python."""
    version: str | None = None
    cuda: str | None = None
    """The CUDA that torch was built for."""
    hip: str | None = None
    """The ROCm that torch was built for."""
    nccl: str | None = None
    gpus: int | None = None
    """How many torch finds; None: it was not imported."""
    error: str | None = None
    """Why the import fails."""
    python_error: str | None = None
    """Why the Python could not run at all."""
    torchvision: str | None = None
    torchvision_error: str | None = None
    compile_obstacle: str | None = None
    """What torch.compile lacks here for GPUs."""
    driver: str | None = None
    """NVIDIA's; None: there is none, or it was not read."""
    pip: bool = True
    """This Python has pip."""
    python: str | None = None
    """The version of this Python; None: not known."""
    packages: tuple[str, ...] = ()
    """The directories that its packages are in."""

    @property
    def for_cpu(self) -> bool:
        """It was built for the CPU only."""
        return self.version not in (None, UNKNOWN_VERSION) and not self.cuda and not self.hip


def import_torch(executable: str = sys.executable) -> Torch:
    """Import torch and torchvision in a process of their own, of this Python or another one."""
    argv = code_command(_IMPORT, python=None if executable == sys.executable else executable)
    found, error = _ask_python("the import", argv, timeout_s=_IMPORT_TIMEOUT_S)
    if found is None:
        return Torch(executable=executable, error=error)
    if str(found.get("error", "")).startswith("ModuleNotFoundError: No module named 'torch'"):
        return Torch(executable=executable)
    driver = read_driver(os.environ) if found.get("cuda") and not found.get("gpus") else None
    return Torch(executable=executable, **found, compile_obstacle=find_compile_obstacle(os.environ), driver=driver)


def ask_torch(executable: str, environ: Mapping[str, str], working_dir: Path) -> Torch:
    """Read the torch of another Python from its files; `environ` has this package on its path."""
    argv = module_command("clusterddp.facts.torch", python=executable, oldest=OLDEST_PYTHON)
    found, error = _ask_python("its start", argv, timeout_s=_START_TIMEOUT_S, environ=environ, cwd=working_dir)
    return Torch(executable=executable, python_error=error) if found is None else build(Torch, found)


def ask_python(executable: str, environ: Mapping[str, str]) -> Torch:
    """Read the torch of another Python of this machine, as its ranks would find it, from its files.

    Of the Python of this process it sees this package only.
    """
    with tempfile.TemporaryDirectory(prefix="clusterddp-") as directory:
        Path(directory, "clusterddp").symlink_to(Path(clusterddp.__file__).absolute().parent)
        paths = os.pathsep.join(filter(None, (directory, environ.get("PYTHONPATH"))))
        return ask_torch(executable, {**environ, "PYTHONPATH": paths}, Path(directory))


def read_torch() -> Torch:
    """Read the torch that this process could import, from its files."""
    place = find_package("torch")
    values = read_torch_values(place)
    return Torch(
        version=(values.get("__version__") or _installed_version("torch") or UNKNOWN_VERSION) if place else None,
        cuda=values.get("cuda"),
        hip=values.get("hip"),
        nccl=next((version for name in _NCCL if (version := _installed_version(name))), None) if place else None,
        torchvision=_installed_version("torchvision"),
        compile_obstacle=find_compile_obstacle(os.environ),
        pip=importlib.util.find_spec("pip") is not None,
        python=platform.python_version(),
        packages=tuple(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
    )


def explain_old_driver(cuda: str, driver: str) -> tuple[str, str] | None:
    """Return why a driver is too old for the CUDA that a torch was built for, and the fix; None when it is not."""
    wants, has = cuda.partition(".")[0], driver.partition(".")[0]
    if not (wants.isdigit() and has.isdigit()) or int(has) >= _MIN_DRIVER.get(int(wants), 0):
        return None
    runs = max((version for version, least in _MIN_DRIVER.items() if least <= int(has)), default=None)
    older = f"a torch for CUDA {runs} or older" if runs else "an older torch"
    return (
        f"which needs NVIDIA's driver {_MIN_DRIVER[int(wants)]} or newer; this host has {driver}",
        f"a newer driver, or {older}: https://pytorch.org/get-started/previous-versions",
    )


def install_command(torch: Torch, version: str | None) -> str:
    """Return the command that installs this version of torch (`2.10.0+cu128`; None: any) for the same Python.

    pip replaces another build of the same release only with --force-reinstall.
    """
    python = shlex.quote(torch.executable)
    installer = f"{python} -m pip install" if torch.pip else f"uv pip install --python {python}"
    release, _, built_for = (version or "").partition("+")
    if torch.version is not None and torch.version.partition("+")[0] == release:
        installer += " --force-reinstall" if torch.pip else " --reinstall"
    if not re.fullmatch(r"[0-9.]+(?:(?:a|b|rc|\.dev|\.post)[0-9]+)*", release):
        return f"{installer} torch"
    # The index has a folder for each kind of build.
    has_index = re.fullmatch(r"cu[0-9]+|cpu|rocm[0-9.]+|xpu", built_for)
    return f"{installer} torch=={release}" + (f" --index-url {_INDEX}/{built_for}" if has_index else "")


def find_compile_obstacle(environ: Mapping[str, str]) -> str | None:
    """Return what torch.compile lacks here to build kernels for GPUs; None: nothing.

    Triton compiles a piece of C against Python.h. Source: `_build` in triton/runtime/build.py.
    """
    compiler = environ.get("CC") or "gcc"
    if not any(shutil.which(name, path=environ.get("PATH")) for name in (compiler, "clang")):
        return "no C compiler: neither CC nor gcc nor clang"
    include = sysconfig.get_path("include")
    return None if (Path(include) / "Python.h").is_file() else f"no Python.h in {include}"


def _ask_python(
    what: str,
    argv: tuple[str, ...],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[dict[str, Any] | None, str | None]:
    """Run a Python that prints FOUND and an object; return the object, or None and why `what` has failed."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=None if environ is None else dict(environ),
            cwd=cwd,
            check=False,
        )
        return read_object(done.stdout.rpartition("FOUND")[2]), None
    except subprocess.TimeoutExpired:
        return None, f"{what} takes longer than {timeout_s:.0f} s"
    except OSError as error:
        return None, error.strerror or str(error)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"{what} ends with exit code {done.returncode}"


def _installed_version(name: str) -> str | None:
    import importlib.metadata  # slow, and every host imports this module

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print("FOUND" + json.dumps(dataclasses.asdict(read_torch())))
