"""The built-in trainer's ranks meet as network.init says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import clusterddp
from clusterddp.system.python import module_command
from tests.support.waiting import PATIENCE

SPEC = """
name: job
device: cpu
resources: {procs_per_node: 2}
network: {init: file}
train: {dataset: shapes, samples: 64, model: fastnet, width: 0.125, batch_size: 8, max_steps: 1}
"""


@pytest.mark.slow
def test_the_trainers_ranks_meet_by_a_file_where_no_address_is_set(tmp_path: Path) -> None:
    plan = clusterddp.plan(SPEC, runs_dir=tmp_path)
    for directory in (plan.run_dir / "attempts/0", plan.run_dir / "launcher", plan.run_dir / "checkpoints"):
        directory.mkdir(parents=True)
    (plan.run_dir / "plan.json").write_text(json.dumps(plan.to_json()))
    base = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    base |= {"CLUSTERDDP_RUN_DIR": str(plan.run_dir), "CLUSTERDDP_BACKEND": "gloo", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            module_command("clusterddp.node.rank", str(plan.run_dir)),
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(PATIENCE * 120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert json.loads((plan.run_dir / "summary.json").read_text())["world_size"] == 2
    assert not (plan.run_dir / "attempts/0/rendezvous").exists()
