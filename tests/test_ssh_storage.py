"""Storage of a run over SSH: a disk of one host that takes no record."""

from pathlib import Path

import pytest
from rack.rack import Rack
from ssh_place import SshPlace
from storage_faults import shared_disk

pytestmark = [pytest.mark.root]

FAIL_LATER = """
import os, time
print("up", flush=True)
while not os.path.exists("/tmp/fail"):
    time.sleep(0.05)
os._exit(3 if os.environ["RANK"] == "1" else 0)
"""
SPEC = """
name: job
launcher: ssh
ssh: {hosts: [node1, node2]}
resources: {procs_per_node: 1}
entry: {script: entry.py}
"""


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_another_host_records_the_end_that_the_head_s_disk_does_not_take(
    ssh_place: SshPlace, lan: Rack, what: str, tmp_path: Path
):
    (ssh_place.path / "entry.py").write_text(FAIL_LATER)
    for node in ("node1", "node2"):
        lan.run(node, ["rm", "-f", "/tmp/fail"])
    runs = Path("/root/.clusterddp/runs")
    with shared_disk(lan, tmp_path / "disk", at=runs, hosts=["node1"]) as disk:
        run = ssh_place.submit(SPEC)
        ssh_place.await_state("RUNNING")
        disk.fill() if what == "full" else disk.make_read_only()
        for node in ("node1", "node2"):
            lan.run(node, ["touch", "/tmp/fail"])
        status = ssh_place.await_state("FAILED", "LOST", run=run)
    assert status["root_cause"]["error"] == "rank 1 on node2 left with exit code 3"
