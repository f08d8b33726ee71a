"""`clusterddp doctor --job` on a real Slurm: green when all is well, red for what is broken on one host."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, SYSTEM_PATH, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

SPEC = "name: job\nlauncher: slurm\ndevice: cpu\nresources: {nodes: 2, procs_per_node: 2}\nentry: {script: a.py}\n"
TORCH = "class version:\n    cuda = None\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"


@dataclass(frozen=True)
class Seen:
    exit_code: int
    checks: list[dict[str, Any]]
    said: str

    def of(self, check: str, host: str) -> dict[str, Any]:
        return next(entry for entry in self.checks if (entry["check"], entry["host"]) == (check, host))

    @property
    def red(self) -> set[tuple[str, str]]:
        return {(entry["check"], entry["host"]) for entry in self.checks if entry["level"] == "red"}


@pytest.fixture(scope="module")
def two_nodes(needs_rack: None) -> Iterator[Rack]:
    """Two nodes on which tests break things, and mend them again; a torch that is imported at once."""
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        make_torch(rack.dir / "shared" / "packages", "2.10.0")
        # Of another length: a .pyc that is written while one directory is put over the other would be valid in both.
        make_torch(rack.dir / "shared" / "other", "2.9.1")
        write_spec(rack)
        yield rack


def write_spec(rack: Rack) -> None:
    (rack.dir / "shared" / "job.yaml").write_text(SPEC)
    (rack.dir / "shared" / "a.py").touch()


def make_torch(directory: Path, version: str) -> None:
    for name in ("torch", "torchvision"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(f"__version__ = {version!r}\n{TORCH}")


def doctor(rack: Rack, *arguments: str, **environ: str) -> Seen:
    done = rack.run(
        HEAD,
        [sys.executable, "-m", "clusterddp", "doctor", "job.yaml", "-o", "json", *arguments],
        env={"PYTHONPATH": f"{ROOT}:{rack.dir}/shared/packages", **environ},
        cwd=rack.dir / "shared",
        check=False,
        timeout_s=150,
    )
    assert done.stdout, done.stderr
    return Seen(done.returncode, json.loads(done.stdout)["checks"], done.stderr)


@contextmanager
def mounted(rack: Rack, host: str, what: str, where: Path) -> Iterator[None]:
    """Put something else over a path, for one host only."""
    options = ["-t", "tmpfs", "tmpfs"] if what == "tmpfs" else ["--bind", what]
    rack.run(host, ["mount", *options, str(where)])
    try:
        yield
    finally:
        rack.run(host, ["umount", str(where)])


def jobs(rack: Rack) -> list[str]:
    return rack.run(HEAD, ["squeue", "-h", "-o", "%j"]).stdout.split()


def test_a_healthy_rack_is_green(two_nodes: Rack) -> None:
    seen = doctor(two_nodes, "--job")
    assert (seen.exit_code, seen.red) == (0, set())


def test_the_way_to_the_first_node_is_the_interface_that_reaches_it(two_nodes: Rack) -> None:
    assert doctor(two_nodes, "--job").of("way to node1", "node2")["found"] == "10.77.0.11, from 10.77.0.12 by eth0"


def test_nothing_is_left_of_the_job(two_nodes: Rack) -> None:
    before = sorted(path.name for path in (two_nodes.dir / "shared").iterdir())
    doctor(two_nodes, "--job")
    wait_until(lambda: not jobs(two_nodes), 20)
    assert sorted(path.name for path in (two_nodes.dir / "shared").iterdir()) == before


@pytest.mark.parametrize(("broken", "whole"), [("node1", "node2"), ("node2", "node1")])
def test_a_node_without_the_runs_directory_is_red(broken: str, whole: str, two_nodes: Rack, tmp_path: Path) -> None:
    runs = tmp_path / "elsewhere" / "runs"
    runs.mkdir(parents=True)
    with mounted(two_nodes, broken, "tmpfs", runs.parent):
        seen = doctor(two_nodes, "--job", "--runs", str(runs))
    assert seen.exit_code == 3
    assert seen.red == {("runs directory", broken)}
    assert seen.of("runs directory", whole)["level"] == "ok"


def test_a_node_that_is_done_before_the_others_is_judged_too(needs_rack: None, tmp_path: Path) -> None:
    """While a job completes, squeue names only the nodes that are not done with it."""
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\nwhile squeue=$(/usr/bin/squeue -h -t all -o %T); [ $squeue = PENDING ] || [ $squeue = RUNNING ]\n"
        'do sleep 0.2; done\nexec /usr/bin/squeue "$@"\n'
    )
    (tmp_path / "epilog").write_text("#!/bin/sh\n[ $SLURMD_NODENAME = node2 ] || sleep 8\n")
    for name in ("squeue", "epilog"):
        (tmp_path / name).chmod(0o755)
    runs = tmp_path / "elsewhere" / "runs"
    runs.mkdir(parents=True)
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack:
        write_spec(rack)
        make_torch(rack.dir / "shared" / "packages", "2.10.0")
        with (rack.dir / "etc/slurm/slurm.conf").open("a") as settings:
            settings.write(f"Epilog={tmp_path}/epilog\n")
        rack.run(HEAD, ["scontrol", "reconfigure"])
        rack.await_idle()
        with mounted(rack, "node2", "tmpfs", runs.parent):
            seen = doctor(rack, "--job", "--runs", str(runs), PATH=f"{tmp_path}:{SYSTEM_PATH}")
    assert (seen.exit_code, seen.red) == (3, {("runs directory", "node2")})


def test_a_node_with_another_torch_is_red(two_nodes: Rack) -> None:
    shared = two_nodes.dir / "shared"
    with mounted(two_nodes, "node2", str(shared / "other"), shared / "packages"):
        seen = doctor(two_nodes, "--job")
    assert seen.red == {("torch", "node2")}, seen
    assert seen.of("torch", "node2")["found"] == "2.9.1, here 2.10.0"


def test_a_node_to_which_the_first_one_is_the_loopback_is_red(two_nodes: Rack, tmp_path: Path) -> None:
    table = tmp_path / "hosts"
    table.write_text("127.0.0.1 localhost\n127.0.1.1 node1 node2\n")
    with mounted(two_nodes, "node2", str(table), Path("/etc/hosts")):
        seen = doctor(two_nodes, "--job")
    assert seen.red == {("way to node1", "node2")}
    assert "127.0.1.1" in seen.of("way to node1", "node2")["found"]


def test_a_node_without_this_python_is_red_in_the_words_of_slurm(two_nodes: Rack, tmp_path: Path) -> None:
    with mounted(two_nodes, "node2", "tmpfs", Path(sys.prefix)):
        seen = doctor(two_nodes, "--job")
    assert seen.red == {("report", "node2")}
    assert "No such file or directory" in seen.of("report", "node2")["found"]


def test_a_job_that_does_not_start_in_time_is_reported_and_cancelled_and_no_other(two_nodes: Rack) -> None:
    blocker = two_nodes.run(
        HEAD,
        ["sbatch", "--parsable", "-N2", "--exclusive", "-J", "doctor", "-o", "/dev/null", "--wrap", "sleep 60"],
    ).stdout.strip()
    try:
        seen = doctor(two_nodes, "--job", "--timeout", "3")
        assert (seen.exit_code, seen.red) == (3, {("job", "head")})
        assert "has not started within 3 s" in seen.of("job", "head")["found"]
        assert "waits for nodes to become free (Resources)" in seen.of("job", "head")["found"]
        wait_until(lambda: jobs(two_nodes) == ["doctor"], 20)
    finally:
        two_nodes.run(HEAD, ["scancel", blocker])


def test_a_job_that_slurm_refuses_is_reported_in_slurms_words(two_nodes: Rack) -> None:
    seen = doctor(two_nodes, "--job", "slurm.constraint=nothing")
    assert seen.red == {("job", "head"), ("sbatch --test-only", "head")}
    assert "sbatch:" in seen.of("job", "head")["found"]


def test_the_scheduler_is_asked_about_the_very_plan(two_nodes: Rack) -> None:
    assert doctor(two_nodes).of("sbatch --test-only", "head")["found"].startswith("accepted; it would start at ")


def test_a_controller_that_is_down_is_red(needs_rack: None) -> None:
    with running_rack(RackPlan(nodes=["node1"])) as rack:
        write_spec(rack)
        rack.run(HEAD, ["pkill", "-KILL", "-x", "slurmctld"])
        assert doctor(rack).red == {("Slurm", "head")}


def test_the_ranks_of_a_spec_measure_on_their_nodes(two_nodes: Rack) -> None:
    train = "{model: fastnet, width: 0.25, batch_size: 8, precision: fp32, compile: never}"
    shared = two_nodes.dir / "shared"
    (shared / "deep.yaml").write_text(
        f"name: deep\nlauncher: slurm\ndevice: cpu\nresources: {{nodes: 2, procs_per_node: 1}}\ntrain: {train}\n"
    )
    command = [sys.executable, "-m", "clusterddp", "doctor", "deep.yaml", "--deep", "-o", "json"]
    done = two_nodes.run(HEAD, command, env={"PYTHONPATH": str(ROOT)}, cwd=shared, check=False, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["launcher"], report["state"]) == ("slurm", "COMPLETED")
    assert {(each["probe"], each["host"]) for each in report["findings"] if each["found"]} >= {
        ("train", "node1"),
        ("train", "node2"),
        ("links", "node1"),
    }
