"""Compiles driver.cpp, once for each version of torch, and loads it before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".pytest_cache" / "sim_cuda"


def find_obstacle() -> str | None:
    """Say why this machine cannot emulate CUDA; None where it can."""
    if sys.platform != "linux":
        return "sim_cuda: needs Linux"
    if shutil.which("c++") is None:
        return "sim_cuda: needs a C++ compiler, c++"
    if not (_torch() / "include/ATen/detail/CUDAHooksInterface.h").is_file():
        return "sim_cuda: torch's headers are missing"
    if (_torch() / "lib/libtorch_cuda.so").exists():
        return "sim_cuda: needs torch's CPU build; this one has CUDA of its own"
    return None


def build() -> Path:
    """Compile the driver, unless that was done; return the library."""
    source = HERE / "driver.cpp"
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(f"{_torch()} {version} {sys.version}\n{source.read_text()}".encode()).hexdigest()[:16]
    library = CACHE / f"{key}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=CACHE, suffix=".so")
        os.close(handle)
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{_torch()}/include", f"-L{_torch()}/lib"]
        subprocess.run(["c++", *options, str(source), "-lc10", "-ltorch_cpu", "-o", partial], check=True)
        Path(partial).rename(library)  # other workers may be at it, too
    return library


def load() -> None:
    """Load the driver: torch looks for CUDA's hooks once, while it is imported."""
    assert "torch" not in sys.modules, "import sim_cuda.device before torch"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
