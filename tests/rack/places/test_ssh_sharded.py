"""FSDP2 on hosts that share no storage and have no package but torch: the first host has all shards."""

from __future__ import annotations

import shutil

import pytest

from clusterddp.run.directory import RunDir
from clusterddp.system.files import read_jsonl
from tests.support.paths import ROOT
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """
name: fsdp2
launcher: ssh
device: cpu
resources: {procs_per_node: 1}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
entry: {script: fsdp2.py}
"""


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_sharded_run_stops_and_resumes_on_hosts_that_share_no_storage(ssh_place: SshPlace) -> None:
    shutil.copy(ROOT / "jobs" / "frameworks" / "fsdp2.py", ssh_place.path)
    script = ssh_place.path / "fsdp2.py"
    script.write_text(
        script.read_text().replace(
            "    optimizer.zero_grad()\n", "    __import__('time').sleep(0.05)\n    optimizer.zero_grad()\n"
        )
    )
    run = ssh_place.submit(SPEC)
    there = ssh_place.host_run_dir("node1", run)
    wait_until(lambda: there.metrics.exists() and bool(list(read_jsonl(there.metrics))), 120)
    ssh_place.clusterddp("cancel", "--save", run.name)
    status = ssh_place.await_state("CANCELLED", run=run)
    assert "stopped at a checkpoint" in status["reason"]
    stem = f"step-{status['progress']['step']:08d}-a0"
    stopped = [f"{stem}.json", f"{stem}.pt", f"{stem}.shard-00000", f"{stem}.shard-00001"]
    assert [name for name in names(there) if name.startswith(stem)] == stopped
    copied = {name.partition(".")[2] for name in names(ssh_place.host_run_dir("node2", run))}
    assert copied <= {"json", "pt", "shard-00000", "shard-00001"}  # the newest one while the run went on
    assert [name for name in names(run) if name.startswith(stem)] == stopped  # downloaded

    ssh_place.clusterddp("resume", run.name, "--wait")
    steps = [row["step"] for row in read_jsonl(run.metrics) if row["attempt"] == 1]
    assert min(steps) == status["progress"]["step"] + 1
    assert max(steps) == 200
