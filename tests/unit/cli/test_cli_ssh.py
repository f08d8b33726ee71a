"""`submit --hosts`, `--hostfile`: what the command makes of them; nothing is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SPEC = "name: here\nresources: {gpus_per_node: 2}\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / "hosts").write_text("gpu01 slots=4\ngpu[02-03]  # small\n")
    return tmp_path


def clusterddp(place: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def planned(place: Path, *arguments: str, **options: Any) -> dict[str, Any]:
    done = clusterddp(place, "submit", "job.yaml", *arguments, "-n", "-o", "json", **options)
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def ranks(plan: dict[str, Any]) -> list[tuple[str, int]]:
    return [(node["host"], len(node["ranks"])) for node in plan["gang"]["nodes"]]


def test_hosts_of_the_command_line_mean_the_ssh_launcher(place: Path) -> None:
    plan = planned(place, "--hosts", "a,gpu[01-02]")
    assert (plan["launcher"], ranks(plan)) == ("ssh", [("a", 2), ("gpu01", 2), ("gpu02", 2)])


def test_a_hostfile_names_hosts_and_their_gpus(place: Path) -> None:
    assert ranks(planned(place, "--hostfile", "hosts")) == [("gpu01", 4), ("gpu02", 2), ("gpu03", 2)]


def test_a_hostfile_may_come_through_a_pipe(place: Path) -> None:
    assert ranks(planned(place, "--hostfile", "-", input="x slots=1\n")) == [("x", 1)]


def test_a_wrong_hostfile_is_reported_line_by_line_with_exit_code_two(place: Path) -> None:
    (place / "hosts").write_text("gpu01 slots=4\ngpu02 4\ngpu01\n")
    done = clusterddp(place, "submit", "job.yaml", "--hostfile", "hosts")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hosts:2:7" in done.stderr
    assert "hint: write slots=4" in done.stderr


def test_the_error_of_a_spec_without_hosts_shows_how_to_name_them(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", "--launcher", "ssh")
    assert done.returncode == 2
    assert "launcher ssh has no hosts" in done.stderr
    assert "--hosts gpu01,gpu02 or --hostfile FILE" in done.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "a", "--hostfile", "hosts"], "--hosts and --hostfile both name the hosts"),
        (["--hosts", "a", "--launcher", "slurm"], "--hosts names hosts for launcher ssh"),
        (["--hosts", "-oProxyCommand=x"], "expected a host"),
        (["--hosts", ""], "expected a host"),
    ],
)
def test_what_does_not_go_together_is_refused(place: Path, arguments: list[str], words: str) -> None:
    done = clusterddp(place, "submit", "job.yaml", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_dry_run_shows_what_happens_on_the_hosts(place: Path) -> None:
    done = clusterddp(place, "submit", "job.yaml", "--hosts", "a,b", "-n", "-v")
    assert "2 nodes x 2 = 4 ranks, one GPU each" in done.stdout
    assert "files on every host" in done.stdout
    assert "commands on the hosts" in done.stdout
    assert not (place / "runs").exists()
