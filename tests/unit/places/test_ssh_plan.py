"""The plan of a run over SSH: hosts, ranks, code, paths on hosts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.text.plan import masked_plan, plan_lines
from clusterddp.errors import PreflightError, UsageError
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import Plan, move_plan, plan_on_hosts, plan_run, rename_plan
from clusterddp.planning.ssh import SshPlan
from clusterddp.spec.load import load_spec
from clusterddp.system.python import module_command
from tests.support.launch_runs import git, plan_text
from tests.support.paths import ROOT

HOSTS = "name: a\nlauncher: ssh\nssh: {hosts: [gpu01, {host: gpu02, gpus: 4}]}\n"
ENTRY = "entry: {script: src/train.py}\n"


def plan(text: str, directory: Path, **changes: Any) -> Plan:
    return plan_text(HOSTS + text, directory, **changes)


def ssh_of(text: str, directory: Path) -> SshPlan:
    found = plan_text(f"name: a\nlauncher: ssh\n{text}\n", directory).ssh
    assert found is not None
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    (tmp_path / "notes").mkdir()
    return tmp_path


def there(planned: Plan, home: str = "/home/ana") -> Plan:
    """The plan as it lies on a host."""
    return move_plan(planned, Path(planned.dir_on_hosts.replace("~", home)), home=home)


def test_ranks_follow_each_hosts_own_gpus_in_the_order_written(tmp_path: Path) -> None:
    planned = plan("resources: {gpus_per_node: 2}\n", tmp_path)
    assert [(node.host, node.node_rank, node.ranks) for node in planned.gang.nodes] == [
        ("gpu01", 0, (0, 1)),
        ("gpu02", 1, (2, 3, 4, 5)),
    ]
    assert planned.ssh is not None
    assert [(node.host, node.node_rank, node.gpus) for node in planned.ssh.hosts] == [("gpu01", 0, 2), ("gpu02", 1, 4)]
    assert (planned.gang.world_size, planned.gang.backend) == (6, "nccl")


def test_gpus_of_hosts_that_no_rank_uses_are_named(tmp_path: Path) -> None:
    spec = "name: a\nlauncher: ssh\nssh: {hosts: [a, b]}\nresources: {gpus_per_node: 8, procs_per_node: 4}\n"
    planned = plan_text(spec, tmp_path)
    how = "resources.gpus_per_node=8 without procs_per_node starts one for each"
    assert planned.notes[0] == f"8 of 16 GPUs have no rank of their own: {how}"
    assert any("one GPU each (8 of 16)" in line for line in plan_lines(planned, verbose=False))


def test_what_only_the_hosts_know_is_left_open(tmp_path: Path) -> None:
    gang = plan("resources: {gpus_per_node: 2}\n", tmp_path).gang
    assert (gang.master_addr, gang.master_port, gang.interface) == ("", None, None)
    assert {node.gpus for node in gang.nodes} == {()}


def test_a_rank_on_a_host_has_one_thread_where_the_spec_asks_for_no_cores(tmp_path: Path) -> None:
    assert plan("resources: {gpus_per_node: 2}\n", tmp_path).gang.threads_per_rank == 1
    assert plan("resources: {gpus_per_node: 2, cpus_per_task: 6}\n", tmp_path).gang.threads_per_rank == 6


def test_a_time_limit_holds_as_on_this_machine(tmp_path: Path) -> None:
    assert plan('resources: {time: "2:00:00"}\n', tmp_path).gang.time_limit_s == 7200


def test_hosts_beyond_the_number_of_nodes_are_not_used_and_that_is_said(tmp_path: Path) -> None:
    planned = plan_text('name: a\nlauncher: ssh\nssh: {hosts: ["n[1-6]"]}\nresources: {nodes: 2}\n', tmp_path)
    assert [node.host for node in planned.gang.nodes] == ["n1", "n2"]
    assert "resources.nodes is 2: n3, n4, n5 and 1 more are not used; ~resources.nodes takes all" in planned.notes


def test_on_the_cpu_there_are_the_same_ranks_and_no_gpus(tmp_path: Path) -> None:
    planned = plan("device: cpu\nresources: {gpus_per_node: 2}\n", tmp_path)
    assert planned.ssh is not None
    assert [len(node.ranks) for node in planned.gang.nodes] == [2, 4]
    assert ([node.gpus for node in planned.ssh.hosts], planned.gang.backend) == ([0, 0], "gloo")


def test_a_spec_that_asks_for_no_gpus_says_so(tmp_path: Path) -> None:
    planned = plan_text("name: a\nlauncher: ssh\nssh: {hosts: [a]}\n", tmp_path)
    assert planned.gang.backend == "gloo"
    assert any("no GPUs are asked for" in note for note in planned.notes)


def test_nccl_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="nccl needs GPUs, and none are asked for"):
        plan_text("name: a\nlauncher: ssh\nssh: {hosts: [a]}\nnetwork: {backend: nccl}\n", tmp_path)


def test_a_hosts_own_environment_takes_the_place_of_that_of_all(tmp_path: Path) -> None:
    hosts = "[a, {host: b, venv: ~/v}, {host: c, python: /opt/py, modules: [gcc]}]"
    nodes = ssh_of(f"conda: lab\nssh: {{hosts: {hosts}, modules: [cuda]}}", tmp_path).hosts
    assert [(node.python, node.venv, node.conda, node.modules) for node in nodes] == [
        (None, None, "lab", ("cuda",)),
        (None, "~/v", None, ("cuda",)),
        ("/opt/py", None, None, ("gcc",)),
    ]


def test_all_that_the_section_says_is_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_bytes(b"12345")
    key = "SHA256:" + "a" * 43
    text = f"ssh: {{hosts: [{{host: a, host_key: '{key}'}}], dir: /scratch/ana, fetch: [logs], send: "
    ssh = ssh_of(text + "{data: ~/data, data/one: ~/one}}", tmp_path)
    assert (ssh.root, ssh.fetch) == ("/scratch/ana", ("logs",))
    assert ssh.hosts[0].host_key == key
    assert [(send.source, send.target, send.files, send.bytes) for send in ssh.send] == [
        (f"{tmp_path}/data", "~/data", 1, 5),
        (f"{tmp_path}/data/one", "~/one", 1, 5),
    ]


def test_data_to_send_that_is_not_there_is_refused_with_the_place_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        ssh_of("ssh: {hosts: [a], send: {data: ~/data}}", tmp_path)
    assert refusal.value.message == f"ssh.send: {tmp_path}/data: no such file or directory"


def test_the_plan_is_the_same_after_a_journey_through_json(repository: Path) -> None:
    planned = plan(ENTRY, repository)
    assert Plan.from_json(json.loads(json.dumps(planned.to_json()))) == planned
    assert Plan.from_json(json.loads(json.dumps(there(planned).to_json()))) == there(planned)


def test_plans_of_other_versions_are_read(tmp_path: Path) -> None:
    data = plan_text("name: a\n", tmp_path).to_json()
    del data["ssh"]
    assert Plan.from_json(data | {"of_the_future": 1}).ssh is None
    data = plan("", tmp_path).to_json()
    del data["ssh"]["home"], data["ssh"]["hosts"][0]["modules"]
    data["ssh"] |= {"attached": True, "of_the_future": 1}
    assert Plan.from_json(data).ssh == plan("", tmp_path).ssh


def test_a_script_runs_from_the_snapshot_and_works_in_it(repository: Path) -> None:
    planned = plan(ENTRY, repository)
    entry = plan_on_hosts(planned).gang.entry
    code = f"~/.clusterddp/runs/{planned.run}.{planned.token[:8]}/code"
    assert (entry.target, entry.import_paths, entry.working_dir) == (f"{code}/src/train.py", (f"{code}/src",), code)


def test_hosts_import_what_is_installed_as_editable_here_from_their_copy_of_the_code(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "lib" / "models").mkdir(parents=True)
    (repository / "lib" / "models" / "__init__.py").write_text("")
    site = repository / ".venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "models.pth").write_text(f"# a comment\nimport sys\n/somewhere/else\n{repository}/lib\n")
    monkeypatch.syspath_prepend(str(site))
    planned = plan(ENTRY, repository)
    code = f"~/.clusterddp/runs/{planned.run}.{planned.token[:8]}/code"
    assert plan_on_hosts(planned).gang.entry.import_paths == (f"{code}/src", f"{code}/lib")


@pytest.mark.parametrize(("directory", "place"), [("src", "code/src"), ("notes", "code")])
def test_ranks_work_where_the_spec_is_submitted_if_the_snapshot_has_it(
    repository: Path, directory: str, place: str
) -> None:
    planned = plan("entry: {script: ../src/train.py}\n", repository / directory, runs_dir=repository / "runs")
    assert planned.gang.entry.working_dir == str(planned.run_dir / place)


def test_the_trainer_works_where_no_code_lies(tmp_path: Path) -> None:
    planned = plan("", tmp_path)
    assert there(planned).gang.entry.working_dir == str(there(planned).run_dir / "launcher")


def test_a_module_outside_of_a_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in no git repository") as refusal:
        plan("entry: {module: package.train}\n", tmp_path)
    assert "snapshot: false" in str(refusal.value.hint)


CORES = "resources: {cpus_per_task: 2}\n"


def test_of_too_much_beside_a_script_it_is_said_what_is_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert plan(f"{CORES}entry: {{script: train.py}}\n", tmp_path).notes == ()
    with open(tmp_path / "train.npz", "wb") as file:
        file.truncate(60_000_000)
    planned = plan(f"{CORES}entry: {{script: train.py}}\n", tmp_path)
    assert planned.snapshot is not None
    assert planned.snapshot["files"] == 1
    (note,) = planned.notes
    assert "1 file, 60.0 MB (largest: train.npz (60.0 MB)) not uploaded" in note


def test_what_git_ignores_is_said_not_to_be_uploaded(repository: Path) -> None:
    (repository / ".gitignore").write_text("data/\n")
    (repository / "data").mkdir()
    (note,) = plan(CORES + ENTRY, repository).notes
    assert note.startswith("git ignores data: not uploaded; ")


def test_a_relative_output_is_said_to_stay_on_the_hosts(repository: Path) -> None:
    (note,) = plan(f"{CORES}entry: {{script: src/train.py, args: [--out, ckpt]}}\n", repository).notes
    assert note == "ckpt is relative: it is in each host's copy of the code; {output_dir} is copied back"


@pytest.mark.parametrize(
    ("script", "target"), [("/opt/x.py", "/opt/x.py"), ("~/x.py", "/home/ana/x.py"), ("x.py", "{here}/x.py")]
)
def test_without_a_snapshot_paths_are_those_of_the_hosts(tmp_path: Path, script: str, target: str) -> None:
    planned = plan(f"snapshot: false\nentry: {{script: {script}}}\n", tmp_path)
    entry = there(planned).gang.entry
    assert entry.target == target.format(here=tmp_path)
    assert entry.import_paths == (str(Path(entry.target).parent),)
    assert planned.snapshot is None


def test_the_data_set_lies_with_everything_else_unless_the_spec_says_where(tmp_path: Path) -> None:
    assert plan("", tmp_path).spec["train"]["data_dir"] == "~/.clusterddp/datasets"
    assert there(plan("", tmp_path)).spec["train"]["data_dir"] == "/home/ana/.clusterddp/datasets"
    planned = plan("train: {data_dir: ~/sets}\n", tmp_path)
    assert there(planned, "/users/ana").spec["train"]["data_dir"] == "/users/ana/sets"


def test_a_plan_on_a_host_has_the_same_run_in_another_directory(repository: Path) -> None:
    planned = plan(ENTRY, repository)
    moved = there(planned)
    assert moved.run_dir == Path(f"/home/ana/.clusterddp/runs/{planned.run}.{planned.token[:8]}")
    assert (moved.run, moved.gang.run, moved.gang.nodes) == (planned.run, planned.run, planned.gang.nodes)
    assert moved.gang.entry.target == str(moved.run_dir / "code/src/train.py")
    assert moved.rank0["CLUSTERDDP_RUN_DIR"]["value"] == str(moved.run_dir)
    assert moved.ssh is not None
    assert moved.ssh.root == "/home/ana/.clusterddp"


def test_a_plan_on_a_host_can_be_moved_again(repository: Path) -> None:
    planned = plan(ENTRY, repository)
    elsewhere = move_plan(there(planned), Path("/mnt/x/y.12345678"), home="/mnt")
    assert elsewhere.gang.entry.target == "/mnt/x/y.12345678/code/src/train.py"
    assert move_plan(there(planned), planned.run_dir).gang.entry == planned.gang.entry


def test_another_name_is_another_directory_on_the_hosts(repository: Path) -> None:
    planned = plan(ENTRY, repository)
    planned.run_dir.mkdir(parents=True)
    other = rename_plan(planned)
    assert other.run != planned.run
    assert other.dir_on_hosts == f"~/.clusterddp/runs/{other.run}.{other.token[:8]}"
    assert other.gang.entry.target == str(other.run_dir / "code/src/train.py")


def test_nothing_of_this_shell_is_in_the_plan(tmp_path: Path) -> None:
    planned = plan("env: {A: b}\n", tmp_path, environ={"PATH": "/bin", "WANDB_MODE": "canary", "A_B": "canary"})
    assert "canary" not in json.dumps(planned.to_json())
    assert planned.gang.env == {"A": "b"}


def test_planning_writes_nothing(repository: Path) -> None:
    before = sorted(repository.rglob("*"))
    plan(ENTRY, repository)
    assert sorted(repository.rglob("*")) == before


def test_the_dry_run_shows_hosts_what_is_sent_and_what_is_started(repository: Path) -> None:
    (repository / "data").mkdir()
    (repository / "data" / "x").write_bytes(b"1" * 2_000_000)
    hosts = "ssh: {hosts: [gpu01, {host: gpu02, gpus: 4, venv: ~/v}], send: {data: ~/data}}\n"
    planned = plan_text(f"name: a\nlauncher: ssh\n{hosts}{ENTRY}", repository)
    text = "\n".join(plan_lines(planned, verbose=True))
    for words in (
        "gpu01  0      any 1  python3",
        "gpu02  1-4    any 4  ~/v/bin/python",
        "the code and 1.9 MiB of data to each host",
        f"~/data  <- {repository}/data (1 file, 1.9 MiB)",
        "~/.clusterddp/code/<sha256 of the code>",
        "exec /bin/sh -c ",
        "gpu02: ~/v/bin/python " + shlex.join(module_command("clusterddp.node.supervisor")[1:]),
        f"python3 {shlex.join(module_command('clusterddp.node.rank')[1:])} ~/.clusterddp/runs/",
        "gpu01's address on it, a free port",
        "1 of gpu01's, leased at the start",
    ):
        assert words in text


def test_the_dry_run_as_json_has_the_paths_of_the_hosts_and_no_token(repository: Path) -> None:
    planned = plan(ENTRY, repository)
    shown = masked_plan(planned)
    assert planned.token not in json.dumps(shown)
    assert shown["gang"]["entry"]["target"].startswith("~/.clusterddp/runs/")
    assert [host["host"] for host in shown["ssh"]["hosts"]] == ["gpu01", "gpu02"]
    assert shown["commands"][0][0].startswith("exec /bin/sh -c ")


@pytest.mark.parametrize("name", ["ssh_lab", "ssh_two_hosts"])
def test_a_shipped_spec_is_planned(name: str, tmp_path: Path) -> None:
    resolved = load_spec(ROOT / "jobs/trainer" / f"{name}.yaml", environ={})
    planned = plan_run(resolved, Request(runs_dir=tmp_path, working_dir=ROOT, environ={}))
    assert (planned.gang.world_size, planned.gang.backend) == (8, "nccl")


def test_the_2x8_spec_is_planned_on_hosts_that_the_command_line_names(tmp_path: Path) -> None:
    resolved = load_spec(
        ROOT / "jobs" / "resnet18_2x8.yaml", ["ssh.hosts=[a, b]"], environ={}, flags={"launcher": "ssh"}
    )
    planned = plan_run(resolved, Request(runs_dir=tmp_path, working_dir=ROOT, environ={}))
    assert [(node.host, len(node.ranks)) for node in planned.gang.nodes] == [("a", 8), ("b", 8)]


def test_a_submit_of_the_resolved_spec_has_the_same_hosts_and_sends_the_same(repository: Path) -> None:
    (repository / "data").mkdir()
    text = "name: a\nlauncher: ssh\nssh: {hosts: ['n[1-3]'], send: {data: ~/d}}\nresources: {nodes: 2}\n"
    planned = plan_text(text, repository)
    again = plan_text(planned.spec_text, repository / "notes")
    assert again.ssh == planned.ssh
    assert again.gang.nodes == planned.gang.nodes


@pytest.mark.root
def test_a_user_who_has_no_name_completes_hosts(tmp_path: Path) -> None:
    program = "from clusterddp.places.ssh.config import home; print(home())"
    environ = {"HOME": "/nowhere/ana", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=environ, user=54_321, cwd="/", capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("/nowhere/ana\n", "")
