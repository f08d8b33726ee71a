"""The doctor on hosts over SSH, each a machine of its own: what it finds when one is not as it should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from clusterddp.ranks.environment import COOKIE
from tests.support.bare_python import lay_out
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.testbed.gpus import fit_gpus, occupy_gpu, remove_gpus
from tests.testbed.network import block_ports, open_ports

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

PYTHON = "/opt/bare/bin/python"
SPEC = """
name: lan
launcher: ssh
device: cpu
resources: {{procs_per_node: 1}}
ssh: {{hosts: [node1, {second}], dir: {directory}}}
python: {python}
"""
TRAIN = "train: {model: fastnet, width: 0.25, batch_size: 8, precision: fp32, compile: never}\n"
Rows = dict[tuple[str, str], dict[str, Any]]


class Doctor:
    """Asks the doctor of a place about two of its hosts."""

    def __init__(self, place: SshPlace) -> None:
        self.place = place
        self.code = -1
        self.write()

    def write(self, second: str = "node2", directory: str = "~/.clusterddp", more: str = "") -> None:
        text = SPEC.format(second=second, directory=directory, python=PYTHON)
        (self.place.path / "job.yaml").write_text(text + more)

    def ask(self, *arguments: str) -> Rows:
        """Return what was found: (check, host) -> row; of several the worst."""
        done = self.place.clusterddp("doctor", "job.yaml", *arguments, "-o", "json", check=False)
        self.code = done.returncode
        assert done.stdout, done.stderr
        rows: Rows = {}
        for row in json.loads(done.stdout)["checks"]:
            key = (row["check"], row["host"])
            if key not in rows or row["level"] == "red":
                rows[key] = row
        return rows

    def reds(self, *arguments: str) -> Rows:
        return {key: row for key, row in self.ask(*arguments).items() if row["level"] == "red"}


@pytest.fixture
def doctor(ssh_place: SshPlace) -> Doctor:
    return Doctor(ssh_place)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def environment(doctor: Doctor, name: str, torch: str | None) -> str:
    """Make a Python on node2 that has this torch, or none; return its spec."""
    home = doctor.place.rack.home("node2") / f"{doctor.place.path.name}-{name}"
    outside = doctor.place.rack.outside("node2", home)
    lay_out(outside, ())
    (site_packages,) = outside.glob("lib/*/site-packages")
    if torch:
        (site_packages / "torch").mkdir()
        (site_packages / "torch/__init__.py").touch()
        (site_packages / "torch/version.py").write_text(f"__version__ = '{torch}'\ncuda = None\n")
    return f"{{host: node2, python: {home}/bin/python}}"


def test_hosts_that_are_as_they_should_be_are_healthy(doctor: Doctor) -> None:
    rows = doctor.ask()
    assert ({key for key, row in rows.items() if row["level"] == "red"}, doctor.code) == (set(), 0)
    checks = {check for check, host in rows if host == "node2"}
    assert checks >= {"ssh", "clock", "Python", "torch", "GPUs", "disk", "network", "left over", "cores"}


def test_the_network_is_shown_with_address_speed_mtu_and_reason(doctor: Doctor) -> None:
    found = doctor.ask()["network", "node2"]["found"]
    assert found == "eth0 10.77.0.12, 10 Gb/s, MTU 1500: the only network by which both hosts reach each other"


def test_the_table_has_what_is_red_first_and_below_it_what_mends_it(doctor: Doctor) -> None:
    doctor.write(environment(doctor, "none", None))
    lines = doctor.place.clusterddp("doctor", "job.yaml", check=False).stdout.splitlines()
    assert (lines[1].split()[:3], lines[2].split()[0]) == (["red", "torch", "node2"], "fix:")


def test_a_host_without_torch_is_red_with_the_command_for_its_own_python(doctor: Doctor) -> None:
    doctor.write(environment(doctor, "none", None))
    version = doctor.ask()["torch", "node1"]["found"].partition("+")[0]
    reds = doctor.reds()
    assert (set(reds), doctor.code) == ({("torch", "node2")}, 3)
    fix = reds["torch", "node2"]["fix"]
    assert fix.startswith("uv pip install --python /root/")
    assert f"-none/bin/python torch=={version} " in fix


def test_torch_of_another_version_is_red_on_the_host_that_differs_from_the_first(doctor: Doctor) -> None:
    doctor.write(environment(doctor, "old", "2.4.1+cpu"))
    (key, row), *others = doctor.reds().items()
    assert (key, row["found"].startswith("2.4.1+cpu, for the CPU; elsewhere 2."), others) == (
        ("torch", "node2"),
        True,
        [],
    )


def test_a_submit_to_a_host_without_torch_is_refused_before_anything_is_sent(doctor: Doctor) -> None:
    doctor.write(environment(doctor, "none", None))
    done = doctor.place.clusterddp("submit", "job.yaml", check=False)
    assert (done.returncode, "node2: torch:" in done.stderr, "uv pip install" in done.stderr) == (3, True, True)
    runs = doctor.place.rack.outside("node1", doctor.place.rack.home("node1") / ".clusterddp/runs")
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "check", "words"), [("16m", "disk", "MiB free"), ("100k", "agent", "No space left on device")]
)
def test_a_full_disk_is_red(doctor: Doctor, undo: ExitStack, size: str, check: str, words: str) -> None:
    rack, directory = doctor.place.rack, f"/srv/small-{size}"
    for node in ("node1", "node2"):
        rack.run(node, ["mkdir", "-p", "-m", "700", directory])
    rack.run("node2", ["mount", "-t", "tmpfs", "-o", f"mode=700,size={size}", "tmpfs", directory])
    undo.callback(rack.run, "node2", ["umount", directory])
    doctor.write(directory=directory)
    reds = doctor.reds()
    assert (set(reds), words in reds[check, "node2"]["found"]) == ({(check, "node2")}, True)


def test_ports_that_a_firewall_closes_are_named(doctor: Doctor, undo: ExitStack) -> None:
    block_ports(doctor.place.rack, "node2", "1024-65535")
    undo.callback(open_ports, doctor.place.rack, "node2")
    reds = doctor.reds()
    assert (set(reds), doctor.code) == ({("network", "node1"), ("network", "node2")}, 3)
    assert "node2 eth0 10.77.0.12" in reds["network", "node2"]["found"]


def test_a_host_that_is_down_is_red_and_the_others_are_looked_at(doctor: Doctor, undo: ExitStack) -> None:
    doctor.place.rack.pull_cable("node2")
    undo.callback(doctor.place.rack.plug_cable, "node2")
    rows = doctor.ask()
    assert (rows["ssh", "node2"]["level"], rows["torch", "node1"]["level"], doctor.code) == ("red", "ok", 3)


def test_what_is_left_over_of_a_run_is_shown(doctor: Doctor, undo: ExitStack) -> None:
    token = os.urandom(16).hex()
    argv = doctor.place.rack.argv(
        "node2", ["sleep", "600"], env={COOKIE: f"{token}.n0", "CLUSTERDDP_RUN": "calm-owl-1"}
    )
    carrier = undo.enter_context(subprocess.Popen(argv))
    undo.callback(carrier.kill)
    undo.callback(kill_all, lambda: doctor.place.processes("node2", token))
    wait_until(lambda: doctor.place.processes("node2", token) != [], 10)
    row = doctor.ask()["left over", "node2"]
    assert (row["level"], "orphaned processes of calm-owl-1: pid" in row["found"]) == ("note", True)
    assert row["fix"] == "clusterddp gc --hosts node2"


def kill_all(find: Callable[[], list[Any]]) -> None:
    for process in find():
        os.kill(process.pid, 9)


def test_gpus_that_are_too_few_or_in_use_are_red_with_their_user(doctor: Doctor, undo: ExitStack) -> None:
    rack = doctor.place.rack
    for node, count in (("node1", 1), ("node2", 2)):
        fit_gpus(rack, node, count)
        undo.callback(remove_gpus, rack, node)
    occupy_gpu(rack, "node2", 0, 1)
    text = SPEC.format(second="node2", directory="~/.clusterddp", python=PYTHON)
    text = text.replace("device: cpu", "device: cuda").replace("procs_per_node: 1", "gpus_per_node: 2")
    (doctor.place.path / "job.yaml").write_text(text + "entry: {module: job}\nsnapshot: false\n")
    rows = doctor.ask()
    assert rows["GPUs", "node1"]["found"] == "2 are asked for, and there is 1"
    found = rows["GPUs", "node2"]["found"]
    assert (rows["GPUs", "node2"]["level"], "1 is free; GPU 0: pid 1" in found) == ("red", True)


def test_data_that_is_missing_and_not_downloaded_is_red(doctor: Doctor) -> None:
    doctor.write(more="train: {dataset: cifar10, data_dir: ~/nowhere, download: false}\n")
    assert doctor.reds()["data", "node1"]["found"] == "/root/nowhere: missing"


def test_data_that_will_be_sent_need_not_be_there(doctor: Doctor) -> None:
    (doctor.place.path / "cifar").mkdir()
    text = (doctor.place.path / "job.yaml").read_text().replace("ssh: {", "ssh: {send: {cifar: ~/data/cifar}, ")
    (doctor.place.path / "job.yaml").write_text(text + "train: {dataset: cifar10, data_dir: ~/data, download: false}\n")
    assert doctor.reds() == {}


def test_deep_names_the_link_of_two_hosts_that_is_slow(doctor: Doctor, undo: ExitStack) -> None:
    doctor.write(more=TRAIN)
    doctor.place.rack.set_link_rate("node2", 50)
    undo.callback(doctor.place.rack.set_link_rate, "node2", None)
    row = doctor.ask("--deep")["links", "node1"]
    found = re.match(r"slow: with node2 (\d+) of 1250 MB/s", row["found"])
    assert found is not None, row
    # The link does 6.25; a busy machine may not keep up with it.
    assert (row["level"], 2 <= int(found[1]) <= 7, doctor.code) == ("note", True, 0), row


def test_deep_names_the_host_among_three_whose_link_is_slow(doctor: Doctor, undo: ExitStack) -> None:
    doctor.write("node2, node3", more=TRAIN)
    doctor.place.rack.set_link_rate("node2", 50)
    undo.callback(doctor.place.rack.set_link_rate, "node2", None)
    levels = {host: row["level"] for (check, host), row in doctor.ask("--deep").items() if check == "links"}
    assert levels == {"node1": "ok", "node2": "note", "node3": "ok"}


def test_hosts_may_be_named_on_the_command_line(doctor: Doctor) -> None:
    text = (doctor.place.path / "job.yaml").read_text().replace("launcher: ssh", "launcher: local")
    (doctor.place.path / "job.yaml").write_text(text)
    assert doctor.ask("--hosts", "node3")["network", "node3"]["level"] == "ok"


def test_all_ways_that_were_tried_are_listed(doctor: Doctor) -> None:
    report = json.loads(doctor.place.clusterddp("doctor", "job.yaml", "-o", "json").stdout)
    ways = {(way["source"], way["target"], way["leaves_by"], way["outcome"]) for way in report["ways"]}
    assert ways == {("node1", "node2", "eth0", "reached"), ("node2", "node1", "eth0", "reached")}


def test_a_job_is_for_a_cluster_only(doctor: Doctor) -> None:
    done = doctor.place.clusterddp("doctor", "job.yaml", "--job", check=False)
    assert (done.returncode, "--job looks at nodes of a Slurm cluster" in done.stderr) == (2, True)


def test_the_ranks_of_a_spec_measure_on_the_hosts(doctor: Doctor) -> None:
    doctor.write(more=TRAIN)
    done = doctor.place.clusterddp("doctor", "job.yaml", "--deep", "-o", "json", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["launcher"], report["state"]) == ("ssh", "COMPLETED")
    assert {(each["probe"], each["host"]) for each in report["findings"] if each["found"]} >= {
        ("train", "node1"),
        ("train", "node2"),
    }
