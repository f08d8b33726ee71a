"""Environments of a user's own, apart from that of clusterddp: a venv, and one as conda makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.bare_python import make_bare_python

REPORT = """\
import json, os, sys
import torch, clusterddp
clusterddp.log({"loss": 1.0}, step=int(os.environ["RANK"]))
print(json.dumps({
    "python": sys.executable,
    "prefix": sys.prefix,
    "venv": os.environ.get("VIRTUAL_ENV"),
    "conda": os.environ.get("CONDA_PREFIX"),
    "path": os.environ["PATH"].split(":")[0],
    "torch": torch.__file__,
    "clusterddp": clusterddp.__file__,
    "others": sorted({"pydantic", "click", "yaml"} & sys.modules.keys()),
    "variable": os.environ.get("OF_THE_SETUP"),
}))
"""
"""Prints which Python a rank runs in; torch and clusterddp can be imported there."""


def make_venv(directory: Path) -> Path:
    """Make a venv with torch, and without pip and clusterddp; return its directory."""
    make_bare_python(directory)
    return directory


def make_conda_home(home: Path, *names: str) -> Path:
    """Make what an installation of conda looks like: bin/conda, etc/profile.d/conda.sh, and these environments."""
    for name in names:
        prefix = home / "envs" / name
        make_bare_python(prefix)
        (prefix / "pyvenv.cfg").rename(prefix / "bin" / "pyvenv.cfg")  # so that the interpreter finds its packages
        (prefix / "conda-meta").mkdir()
        (prefix / "conda-meta" / "history").touch()
    (home / "bin").mkdir(parents=True)
    (home / "etc" / "profile.d").mkdir(parents=True)
    (home / "etc" / "profile.d" / "conda.sh").write_text(_CONDA_SH.format(home=home))
    program = home / "bin" / "conda"
    program.write_text("#!/bin/sh\\necho conda: run conda init first >&2\\nexit 1\\n")
    program.chmod(0o755)
    return home


_CONDA_SH = """\
export CONDA_EXE='{home}/bin/conda'
conda() {{
    case $1 in
    activate)
        if [ ! -d "{home}/envs/$2" ]; then
            echo "EnvironmentNameNotFound: Could not find conda environment: $2" >&2
            return 1
        fi
        export CONDA_PREFIX="{home}/envs/$2" CONDA_DEFAULT_ENV="$2" PATH="{home}/envs/$2/bin:$PATH"
        ;;
    *) command conda "$@" ;;
    esac
}}
"""
"""As conda's own: only the shell function can activate an environment."""


def activated(prefix: Path) -> dict[str, str]:
    """Return the variables that `source PREFIX/bin/activate` sets; none has a path to clusterddp."""
    return {"VIRTUAL_ENV": str(prefix), "PATH": f"{prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": ""}


def make_plain_venv(directory: Path) -> Path:
    """Make a venv without torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return directory
