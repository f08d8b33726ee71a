"""How a container is put around the ranks: pyxis by options of srun, apptainer as words before Python.

apptainer 1.4 is run by tests/rack/launchers/test_slurm_apptainer.py; pyxis follows its documentation, and a test runs
with a stand-in that sets what pyxis sets.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import clusterddp

IMPORT_PATH = "/opt/clusterddp"
"""Where this package lies inside, alone: what else is installed beside it here must not hide what the image has."""
_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')
"""Finds Python inside: srun may look for the first word of a command on the host, where it need not be."""
_TASK = """\
import os, runpy, sys
sys.path.insert(0, sys.argv.pop(1))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Finds this package inside: a PYTHONPATH of the image beats the one that the job's environment has."""


def container_words(container: dict[str, Any] | None, *, mounts: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """Return the words of the task's command up to the name of its module.

    Source: https://apptainer.org/docs/user/latest/cli/apptainer_exec.html
    """
    if container is None:
        return (sys.executable, "-m")
    python = (container["python"], "-c", _TASK, IMPORT_PATH)
    if container["runtime"] == "pyxis":
        return (*_SHELL, *python)
    binds = tuple(f"--bind={mount}" for mount in _mounts(container, mounts, run_dir))
    gpus = ("--nv",) if container["gpus"] else ()
    workdir = (f"--pwd={container['workdir']}",) if container["workdir"] else ()
    return ("apptainer", "exec", *gpus, *binds, *workdir, container["image"], *python)


def container_flags(container: dict[str, Any] | None, *, mounts: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """Return srun's options for a container.

    Source: https://github.com/NVIDIA/pyxis#usage
    """
    if container is None or container["runtime"] != "pyxis":
        return ()
    flags = [
        f"--container-image={container['image']}",
        f"--container-mounts={','.join(_mounts(container, mounts, run_dir))}",
        "--no-container-mount-home",
    ]
    if container["workdir"]:
        flags.append(f"--container-workdir={container['workdir']}")
    return tuple(flags)


def _mounts(container: dict[str, Any], mounts: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """List the mounts as HOST_PATH:PATH[:FLAGS]: the run, what it needs, and the user's own."""
    package = f"{Path(clusterddp.__file__).absolute().parent}:{IMPORT_PATH}/clusterddp:ro"
    users = [mount if ":" in mount else f"{mount}:{mount}" for mount in container["mounts"]]
    targets = [Path(mount.split(":")[1]) for mount in users]
    # What a mount of the user's brings need not be on the nodes under the same path.
    brought = {path for path in mounts if any(Path(path).is_relative_to(target) for target in targets)}
    ours = dict.fromkeys(path for path in (str(run_dir.parent), *mounts) if path not in brought)
    return (*(f"{path}:{path}" for path in ours), package, *users)
