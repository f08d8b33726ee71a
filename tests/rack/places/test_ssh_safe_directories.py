"""A directory of hosts whose writers the user trusts: agents, supervisors and restarts there take it."""

from __future__ import annotations

import pytest

from tests.support.ssh_place import SshPlace

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
SPEC = """
name: lan
launcher: ssh
device: cpu
restarts: 1
resources: {procs_per_node: 1}
ssh: {hosts: [node1, node2], dir: /srv/lab/mine}
python: /opt/bare/bin/python
entry: {script: once.py}
"""


def test_a_run_restarts_in_a_directory_of_hosts_whose_writers_the_user_trusts(ssh_place: SshPlace) -> None:
    place = ssh_place
    (place.path / "once.py").write_text("import os, sys\nsys.exit(os.environ['CLUSTERDDP_ATTEMPT'] == '0')\n")
    (place.path / "job.yaml").write_text(SPEC)
    for node in ("node1", "node2"):
        place.rack.run(node, ["sh", "-c", "mkdir -p /srv/lab; chgrp 2003 /srv/lab; chmod 2770 /srv/lab"])
    refused = place.clusterddp("submit", "job.yaml", "--wait", check=False)
    assert refused.returncode == 3
    assert "export CLUSTERDDP_SAFE_DIRECTORIES=/srv/lab" in refused.stderr
    trusting = {"CLUSTERDDP_SAFE_DIRECTORIES": "/srv/lab"}
    done = place.clusterddp("submit", "job.yaml", "--wait", check=False, environ=trusting)
    assert done.returncode == 0, done.stderr
    assert len(place.run_dir().attempts()) == 2
    for node in ("node1", "node2"):
        place.rack.run(node, ["rm", "-rf", "/srv/lab"])
