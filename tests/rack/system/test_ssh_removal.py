"""rm of runs over SSH: they go on the hosts, too, and a host that does not answer keeps the run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.run.directory import RunDir
from tests.support.ssh_place import SshPlace

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """
name: lan
launcher: ssh
device: cpu
resources: {procs_per_node: 1}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
entry: {script: print.py}
"""


@pytest.fixture
def run(ssh_place: SshPlace) -> RunDir:
    """A run that has ended."""
    (ssh_place.path / "print.py").write_text("print('done')\n")
    (ssh_place.path / "job.yaml").write_text(SPEC)
    done = ssh_place.clusterddp("submit", "job.yaml", "--wait")
    assert done.returncode == 0, done.stderr
    return ssh_place.run_dir()


def on_hosts(place: SshPlace, run: RunDir) -> list[Path]:
    return [place.host_run_dir(node, run).path for node in ("node1", "node2")]


def test_a_run_is_removed_here_and_on_its_hosts(ssh_place: SshPlace, run: RunDir) -> None:
    there = on_hosts(ssh_place, run)
    assert all(path.is_dir() for path in there)
    done = ssh_place.clusterddp("rm", run.name, "--yes", "-o", "json")
    (row,) = json.loads(done.stdout)["runs"]
    assert (done.returncode, row["hosts"], row["removed"]) == (0, ["node1", "node2"], True)
    assert (run.path.exists(), [path.exists() for path in there]) == (False, [False, False])


def test_a_host_that_cannot_be_reached_keeps_the_run_here(ssh_place: SshPlace, run: RunDir) -> None:
    there = on_hosts(ssh_place, run)
    config = ssh_place.rack.dir / "home" / "root" / ".ssh" / "config"
    before = config.read_text() if config.exists() else None
    config.write_text("Host node2\n  Port 9\n" + (before or ""))
    try:
        done = ssh_place.clusterddp("rm", run.name, "--yes", check=False)
        assert (done.returncode, run.record.is_file()) == (1, True)
        assert "node2: cannot be asked" in done.stderr
        assert "--local removes it here" in done.stderr
        assert ssh_place.clusterddp("rm", run.name, "--yes", "--local").returncode == 0
    finally:
        config.unlink() if before is None else config.write_text(before)
    assert (run.path.exists(), there[1].exists()) == (False, True)
