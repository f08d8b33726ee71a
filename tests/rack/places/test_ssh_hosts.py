"""What a plan says of hosts, on hosts: unequal ones of a hostfile, where code and data are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.run.attempts import read_end
from clusterddp.run.directory import RunDir
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = """\
name: lan
device: cpu
ssh: {dir: ~/deep/er}
python: /opt/bare/bin/python
"""
PRINT_FACTS = """\
import json, os, pathlib
names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE NODE_RANK".split()
facts = {name: int(os.environ[name]) for name in names}
facts |= {"cwd": os.getcwd(), "beside": sorted(os.listdir()), "data": (pathlib.Path.home() / "data/x").read_text()}
print(json.dumps(facts))
"""
SLEEP = "import time\ntime.sleep(600)\n"


def dir_on(place: SshPlace, node: str, run: RunDir) -> RunDir:
    name = f"{run.name}.{place.record(run).token[:8]}"
    return RunDir(place.rack.outside(node, place.rack.home(node, "root") / "deep" / "er" / "runs" / name))


def is_complete(place: SshPlace, node: str, run: RunDir) -> bool:
    attempts = dir_on(place, node, run).attempts()
    end = read_end(attempts[-1]) if attempts else None
    return end is not None and end.outcome == "COMPLETED"


def test_unequal_hosts_of_a_hostfile_have_the_ranks_code_and_data_of_the_plan(ssh_place: SshPlace) -> None:
    place = ssh_place
    (place.path / "data").mkdir()
    (place.path / "data" / "x").write_text("sent")
    (place.path / "hosts").write_text("node2 slots=1   # rank 0\nnode1 slots=3\n")
    (place.path / "src").mkdir()
    (place.path / "src" / "facts.py").write_text(PRINT_FACTS)
    spec = SPEC.replace("{dir", "{send: {data: ~/data}, dir") + "entry: {script: src/facts.py}\n"
    run = place.submit(spec, "--hostfile", "hosts")
    wait_until(lambda: is_complete(place, "node2", run), 60)
    facts = []
    for rank, node in enumerate(("node2", "node1", "node1", "node1")):
        there = dir_on(place, node, run)
        facts.append(json.loads(there.attempt(0).stdout(rank).read_text()))
        assert Path(facts[-1]["cwd"]).name == "code"
        assert Path(facts[-1]["cwd"]).parent.name == there.path.name
    assert [fact["RANK"] for fact in facts] == [0, 1, 2, 3]
    assert [(fact["NODE_RANK"], fact["LOCAL_RANK"], fact["LOCAL_WORLD_SIZE"]) for fact in facts] == [
        (0, 0, 1), (1, 0, 3), (1, 1, 3), (1, 2, 3),
    ]  # fmt: skip
    assert {fact["WORLD_SIZE"] for fact in facts} == {4}
    assert {fact["data"] for fact in facts} == {"sent"}
    place.await_gone()
