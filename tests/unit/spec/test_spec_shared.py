"""The project file and the site file: where they are found, whom they belong to, what they may set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.errors import SpecError
from clusterddp.planning.placement import Request
from clusterddp.planning.plan import plan_changed, plan_run
from clusterddp.spec.layers import ALLOWED, find_project_file, read_shared_files
from clusterddp.spec.load import load_spec
from clusterddp.spec.model import JobSpec, json_schema
from clusterddp.spec.sweep import load_sweep

CODE = "entry: {script: a.py}\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a spec in jobs/."""
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "jobs").mkdir()
    (tmp_path / "repo" / "jobs" / "a.yaml").write_text("name: a\n")
    return tmp_path / "repo"


@pytest.fixture
def spec(project: Path) -> Path:
    return project / "jobs" / "a.yaml"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def problem_of(spec: Path, environ: dict[str, str]) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        load_spec(spec, environ=environ)
    (problem,) = caught.value.problems
    where = problem.source if problem.line is None else f"{problem.source}:{problem.line}"
    return where, f"{problem.key}: {problem.message}\n{problem.hint}"


def test_the_spec_overrides_the_project_which_overrides_the_site(project: Path, spec: Path, tmp_path: Path) -> None:
    site = write(tmp_path / "site.yaml", "restarts: 1\nresources: {nodes: 2, memory_gb: 8}\nenv: {A: site, B: site}\n")
    write(project / "clusterddp.yaml", "restarts: 2\nresources: {nodes: 3}\nenv: {B: project}\n")
    spec.write_text("name: a\nrestarts: 3\n")
    loaded = load_spec(spec, ["restarts=4"], environ={"CLUSTERDDP_SITE": str(site)}).job
    assert (loaded.restarts, loaded.resources.nodes, loaded.resources.memory_gb) == (4, 3, 8)
    assert loaded.env == {"A": "site", "B": "project"}
    assert load_spec(spec, environ={"CLUSTERDDP_SITE": str(site)}).job.restarts == 3


def test_a_profile_overrides_the_project_only_if_it_is_named(project: Path, spec: Path, tmp_path: Path) -> None:
    write(project / "clusterddp.yaml", "restarts: 2\n")
    site = write(tmp_path / "site.yaml", "hang: fail\nrestarts: 7\n")
    config = tmp_path / "config.yaml"
    config.write_text("profiles: {lab: {restarts: 1, hang: restart}}\ndefault_profile: lab\n")
    environ = {"CLUSTERDDP_CONFIG": str(config), "CLUSTERDDP_SITE": str(site)}
    default, named = load_spec(spec, environ=environ).job, load_spec(spec, environ=environ, profile="lab").job
    assert (default.restarts, default.hang) == (2, "restart")
    assert (named.restarts, named.hang) == (1, "restart")


def test_each_value_names_the_file_and_the_line_it_comes_from(project: Path, spec: Path) -> None:
    shared = write(project / "clusterddp.yaml", "env: {A: b}\nrestarts: 2\n")
    changes = {change["key"]: change for change in load_spec(spec, environ={}).changes()}
    assert (changes["restarts"]["origin"], changes["restarts"]["file"]) == (f"{shared}:2", str(shared))
    assert (changes["name"]["origin"], changes["name"]["file"]) == (f"{spec}:1", None)


def test_the_file_is_looked_for_up_to_the_root_of_the_repository(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "clusterddp.yaml", "restarts: 2\n")
    assert find_project_file({}, project / "jobs") is None
    write(project / "clusterddp.yaml", "restarts: 2\n")
    assert find_project_file({}, project / "jobs") == project / "clusterddp.yaml"
    write(project / "jobs" / "clusterddp.yaml", "restarts: 2\n")
    assert find_project_file({}, project / "jobs") == project / "jobs" / "clusterddp.yaml"


def test_outside_of_a_repository_it_is_looked_for_up_to_the_home_directory(tmp_path: Path) -> None:
    inner = tmp_path / "home" / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path / "clusterddp.yaml", "restarts: 2\n")
    environ = {"HOME": str(tmp_path / "home")}
    assert find_project_file(environ, inner) is None
    write(tmp_path / "home" / "clusterddp.yaml", "restarts: 2\n")
    assert find_project_file(environ, inner) == tmp_path / "home" / "clusterddp.yaml"


def test_without_either_it_is_looked_for_in_directories_of_the_user_that_others_cannot_write(tmp_path: Path) -> None:
    inner = tmp_path / "open" / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path / "open" / "clusterddp.yaml", "restarts: 2\n")
    assert find_project_file({}, inner) == tmp_path / "open" / "clusterddp.yaml"
    (tmp_path / "open").chmod(0o777)
    assert find_project_file({}, inner) is None


def test_a_spec_of_the_files_name_is_a_spec(project: Path) -> None:
    path = write(project / "clusterddp.yaml", "name: a\nrestarts: 2\n" + CODE)
    assert load_spec(path, environ={}).job.restarts == 2


def test_variables_name_other_files_or_none(project: Path, spec: Path, tmp_path: Path) -> None:
    write(project / "clusterddp.yaml", "restarts: 2\n")
    other = write(tmp_path / "other.yaml", "restarts: 3\n")
    assert load_spec(spec, environ={"CLUSTERDDP_PROJECT": str(other)}).job.restarts == 3
    assert load_spec(spec, environ={"CLUSTERDDP_PROJECT": "", "CLUSTERDDP_SITE": ""}).job.restarts == 0
    where, words = problem_of(spec, {"CLUSTERDDP_SITE": str(tmp_path / "none.yaml")})
    assert (where, "cannot be read: No such file" in words) == (str(tmp_path / "none.yaml"), True)


@pytest.mark.parametrize("mode", [0o646, 0o602])
def test_a_file_that_others_can_write_is_refused(project: Path, spec: Path, mode: int) -> None:
    shared = write(project / "clusterddp.yaml", "restarts: 2\n")
    shared.chmod(mode)
    where, words = problem_of(spec, {})
    assert where == str(shared)
    assert f"can be written by other users (mode {mode:04o}): its values are not used" in words
    assert f"chmod go-w {shared}; CLUSTERDDP_PROJECT= (empty) goes without it" in words


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_or_of_a_common_group_is_refused(project: Path, spec: Path, tmp_path: Path) -> None:
    shared = write(project / "clusterddp.yaml", "restarts: 2\n")
    os.chown(shared, 1, -1)
    assert "belongs to daemon, expected your own file or root's" in problem_of(spec, {})[1]
    os.chown(shared, 0, 1)
    shared.chmod(0o664)
    assert "can be written by other users (mode 0664)" in problem_of(spec, {})[1]
    os.chown(shared, 0, 0)  # root's own group
    assert load_spec(spec, environ={}).job.restarts == 2
    shared.rename(tmp_path / "kept.yaml")
    shared.symlink_to(tmp_path / "kept.yaml")
    os.lchown(shared, 1, 1)
    assert "belongs to daemon" in problem_of(spec, {})[1]


@pytest.mark.parametrize("key", ["entry", "name", "sweep", "after"])
def test_keys_of_one_spec_are_refused_with_their_place(project: Path, spec: Path, key: str) -> None:
    value = {"entry": "{script: a.py}", "sweep": "{values: {train.lr: [1, 2]}}", "after": "[x]", "name": "a"}[key]
    shared = write(project / "clusterddp.yaml", f"restarts: 1\n{key}: {value}\n")
    where, words = problem_of(spec, {})
    assert where == f"{shared}:2"
    assert words.startswith(f"{key}: belongs in a spec: ")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("secrets: [AWS_SECRET_ACCESS_KEY]\n", "secrets"),
        ("setup: [./evil]\n", "setup"),
        ("python: ./evil\n", "python"),
        ("venv: evil\n", "venv"),
        ("conda: /tmp/evil\n", "conda"),
        (
            "ssh: {hosts: [a, {host: b, host_key: 'SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA'}]}\n",
            "ssh.hosts.host_key",
        ),
    ],
)
def test_a_project_file_decides_on_no_secret_no_host_key_and_no_python(
    project: Path, spec: Path, tmp_path: Path, text: str, key: str
) -> None:
    shared = write(project / "clusterddp.yaml", f"restarts: 1\n{text}")
    where, words = problem_of(spec, {})
    assert where == f"{shared}:2"
    assert words.startswith(f"{key}: belongs in a spec, a profile or the site file: ")
    shared.unlink()
    site = write(tmp_path / "site.yaml", text)
    assert load_spec(spec, environ={"CLUSTERDDP_SITE": str(site)}).job.restarts == 0


def test_whether_a_shared_file_may_set_a_key_is_decided_for_every_key() -> None:
    of_one_spec = {"name", "entry", "notify", "sweep", "after"}
    assert of_one_spec | set(ALLOWED) == set(JobSpec.model_fields)


def test_wrong_values_and_unknown_keys_have_their_file_and_line(project: Path, spec: Path) -> None:
    shared = write(project / "clusterddp.yaml", "env: {A: b}\nrestarts: many\n")
    assert problem_of(spec, {})[0] == f"{shared}:2"
    write(shared, "restart: 1\n")
    assert problem_of(spec, {})[1].startswith('restart: unknown key. Did you mean "restarts"?')
    write(shared, "restarts: [\n")
    assert problem_of(spec, {})[0].startswith(f"{shared}:")


def test_values_for_the_trainer_hold_for_specs_without_an_entry(project: Path, spec: Path) -> None:
    write(project / "clusterddp.yaml", "train: {data_dir: /data}\n")
    trainer = load_spec(spec, environ={}).job.train
    assert trainer is not None
    assert trainer.data_dir == "/data"
    assert load_spec(spec, ["entry.script=a.py"], environ={}).job.train is None
    spec.write_text("name: a\n" + CODE)
    assert load_spec(spec, environ={}).job.train is None


def test_each_run_of_a_sweep_has_the_values(project: Path, spec: Path) -> None:
    write(project / "clusterddp.yaml", "restarts: 2\n")
    read = load_sweep(spec, ["train.lr=0.1,0.2"], sweep=True, environ={})
    assert [variant.resolved.job.restarts for variant in read.variants] == [2, 2]


def test_a_run_goes_on_as_planned_after_the_files_have_changed(project: Path, spec: Path, tmp_path: Path) -> None:
    write(project / "clusterddp.yaml", "env: {A: b}\nslurm: {qos: high}\n")
    request = Request(runs_dir=project / "runs", working_dir=project, environ={})
    plan = plan_run(load_spec(spec, environ={}), request)
    own = project / "runs" / "spec.yaml"
    own.parent.mkdir()
    own.write_text(plan.spec_text)
    write(project / "clusterddp.yaml", "restarts: 9\nenv: {A: c, B: d}\nslurm: {partition: gpu}\nsnapshot: false\n")
    config = tmp_path / "config.yaml"
    config.write_text("profiles: {lab: {slurm: {account: x}, hang: 'off'}}\ndefault_profile: lab\n")
    again = plan_changed(plan, own, ["train.epochs=3"], {"CLUSTERDDP_CONFIG": str(config)})
    assert again.spec == plan.spec | {"train": plan.spec["train"] | {"epochs": 3}}


def test_the_directory_of_the_runs_is_from_the_file_on(project: Path, tmp_path: Path) -> None:
    site = write(tmp_path / "site.yaml", "runs_dir: /scratch/{user}/runs\n")
    environ = {"CLUSTERDDP_SITE": str(site)}
    directory = read_shared_files(environ, project / "jobs").runs_dir
    assert directory is not None
    assert (str(directory).startswith("/scratch/"), directory.name, "{" in str(directory)) == (True, "runs", False)
    write(project / "clusterddp.yaml", "runs_dir: out/runs\n")
    assert read_shared_files(environ, project / "jobs").runs_dir == project / "out" / "runs"
    write(project / "clusterddp.yaml", "runs_dir: [a]\n")
    with pytest.raises(SpecError, match=r"clusterddp\.yaml"):
        read_shared_files(environ, project)


def test_the_schema_of_a_shared_file_has_its_keys() -> None:
    schema = json_schema(shared=True)
    assert set(schema["properties"]) == {*ALLOWED, "runs_dir"}
    assert "required" not in schema
