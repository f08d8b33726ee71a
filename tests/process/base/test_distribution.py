"""The sdist and the wheel that is built from it: installed alone, the command works with all that it ships."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import clusterddp
from tests.support.paths import ROOT

SPEC = "name: job\nlauncher: local\ndevice: cpu\nentry: {command: [echo, installed]}\n"


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_that_the_sdist_builds_is_installed_and_submits_a_run(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path / "dist")]
    run(*build, "--target", "sdist", cwd=ROOT)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    run("tar", "-xzf", sdist, cwd=tmp_path)
    run(*build, "--target", "wheel", cwd=tmp_path / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == f"clusterddp-{clusterddp.__version__}-py3-none-any.whl"

    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    found = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    # What it depends on is taken from the environment of the tests, behind what was installed.
    (Path(found.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    command = tmp_path / "env/bin/clusterddp"
    (tmp_path / "job.yaml").write_text(SPEC)
    assert run(command, "--version", cwd=tmp_path).split()[-1] == clusterddp.__version__
    assert run(command, "help", "spec", cwd=tmp_path) == (ROOT / "docs/reference/spec.md").read_text()
    run(command, "init", "mine.yaml", "--launcher", "local", "--script", "none", cwd=tmp_path)
    run(command, "submit", "job.yaml", "--wait", cwd=tmp_path)
    assert "installed" in run(command, "logs", cwd=tmp_path)
    where = run(python, "-c", "import clusterddp; print(clusterddp.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
