"""The pictures of docs/pictures: what the command prints for a run and for a spec that are in this repository."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
_COLUMNS = 80
"""A picture is at least as wide as a terminal usually is."""
_WHERE = "/home/me/lab"
"""Stands in the pictures for the directory in which the command ran."""
_PYTHON = "  python    /opt/lab/bin/python (3.12.4, torch 2.13.0+cu128): clusterddp's own\n"
"""Stands in the picture for the Python of this machine."""
_SEAL = """
import json, pathlib
from clusterddp.run.seal import sealed
for path in pathlib.Path().glob("runs/*/plan.json"):
    path.write_text(json.dumps(sealed(json.loads(path.read_text()))))
"""
"""Makes the runs those of the user of the pictures."""


def make_pictures() -> dict[Path, str]:
    """Return the text of each picture by its path."""
    return {
        PICTURES / "status.svg": _svg("clusterddp status", status_text()),
        PICTURES / "plan.svg": _svg("clusterddp submit jobs/resnet18_2x8.yaml --dry-run", plan_text()),
    }


def status_text() -> str:
    """Return what `status` prints for the run in docs/pictures/runs, colours included."""
    return _run(["status", "brisk-otter-3"], files=["docs/pictures/runs"])


def status_json() -> str:
    """Return what `status -o json` prints for that run."""
    return _run(["status", "brisk-otter-3", "-o", "json"], files=["docs/pictures/runs"])


def plan_text() -> str:
    """Return what `submit -n` prints for a job of 16 ranks on Slurm, colours included."""
    text = _run(["submit", "jobs/resnet18_2x8.yaml", "--dry-run"], files=["jobs/resnet18_2x8.yaml"])
    head, _, _ = text.partition("\n\n\x1b[33m\x1b[1mnote")  # the notes are about this machine
    return re.sub(r"(?ms)^  python .*?(?=^  \w)", _PYTHON, head).rstrip() + "\n"


def command_output(*arguments: str) -> str:
    """Return what the command prints in this repository, without colour."""
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"NO_COLOR": "1"}
    argv = [sys.executable, "-m", "clusterddp", *arguments]
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=120).stdout


def _run(arguments: list[str], *, files: list[str]) -> str:
    """Run the command in a directory that has only `files`, with an environment that says nothing of this machine."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        for file in files:
            target = place / file.removeprefix("docs/pictures/")
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / file).is_dir() else shutil.copy)(ROOT / file, target)
        environ = {"PATH": "/usr/bin:/bin", "HOME": f"{place}/home", "LANG": "C.UTF-8", "FORCE_COLOR": "1"}
        environ["PYTHONPATH"] = str(ROOT)
        subprocess.run(["git", "init", "--quiet", str(place)], env=environ, check=True, capture_output=True)
        subprocess.run([sys.executable, "-c", _SEAL], cwd=place, env=environ, check=True)
        done = subprocess.run(
            [sys.executable, "-m", "clusterddp", *arguments],
            cwd=place,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode not in {0, 3}:
            raise RuntimeError(f"clusterddp {' '.join(arguments)}: exit code {done.returncode}: {done.stderr}")
        return done.stdout.replace(str(place), _WHERE).replace(" home/", " /home/me/")


def _svg(title: str, text: str) -> str:
    plain = Text.from_ansi(text).plain
    width = max(_COLUMNS, *map(len, plain.splitlines()))
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False
    )
    console.print(Text.from_ansi(text), soft_wrap=False)
    svg = console.export_svg(title=title, unique_id=title.split()[1])
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
