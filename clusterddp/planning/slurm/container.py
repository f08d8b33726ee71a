"""Ranks in a container: pyxis by options of srun, apptainer by a command before Python.

tests/rack/launchers/test_slurm_apptainer.py runs apptainer 1.4. The options of pyxis follow its documentation; a test
runs them with a fake that sets the same variables.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import clusterddp

IMPORT_PATH = "/opt/clusterddp"
"""Where the container has this package, and only it: no package of the host may hide one of the image."""
_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')
"""Finds Python inside the container: srun may look for the first word of a command on the host."""
_TASK = """\
import os, runpy, sys
sys.path.insert(0, sys.argv.pop(1))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Finds this package inside the container: a PYTHONPATH of the image wins over the one of the job."""


def container_words(container: dict[str, Any] | None, *, mounts: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """Return the task's argv up to the name of its module.

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
    """List the mounts as HOST_PATH:PATH[:FLAGS]: of the run, of the directories that it needs, and the user's own."""
    package = f"{Path(clusterddp.__file__).absolute().parent}:{IMPORT_PATH}/clusterddp:ro"
    users = [mount if ":" in mount else f"{mount}:{mount}" for mount in container["mounts"]]
    targets = [Path(mount.split(":")[1]) for mount in users]
    # A path inside a user's mount need not exist on the nodes.
    brought = {path for path in mounts if any(Path(path).is_relative_to(target) for target in targets)}
    ours = dict.fromkeys(path for path in (str(run_dir.parent), *mounts) if path not in brought)
    return (*(f"{path}:{path}" for path in ours), package, *users)
