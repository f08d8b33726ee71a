"""The login node of a profile, and the errors of a wrong one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterddp.cli.login import SentRun, find_sent_run, write_sent_run
from clusterddp.cli.login_command import plan_command
from clusterddp.errors import ClusterddpError, SpecError, UsageError
from clusterddp.run.seal import sealed
from clusterddp.spec.layers import read_profile, read_profile_login
from clusterddp.spec.load import load_spec
from clusterddp.system.files import write_json


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"CLUSTERDDP_CONFIG": str(tmp_path / "config.yaml")}


def configure(environ: dict[str, str], login: str, more: str = "") -> None:
    Path(environ["CLUSTERDDP_CONFIG"]).write_text(f"profiles:\n  hpc: {{launcher: slurm, login: {login}}}\n{more}")


def test_a_login_node_may_be_a_name_alone(environ: dict[str, str]) -> None:
    configure(environ, "hpc-login")
    found = read_profile_login(environ, "hpc")
    assert found is not None
    assert (found[0], found[1].host, found[1].runs_dir) == ("hpc", "hpc-login", "~/clusterddp-runs")


def test_a_login_node_names_its_python_and_the_directory_of_runs(environ: dict[str, str]) -> None:
    configure(environ, "{host: hpc, venv: ~/torch, modules: [slurm], runs_dir: /scratch/ana}", "default_profile: hpc\n")
    found = read_profile_login(environ, None)
    assert found is not None
    assert (found[1].venv, found[1].modules, found[1].runs_dir) == ("~/torch", ("slurm",), "/scratch/ana")


def test_a_login_node_is_no_value_of_the_spec(environ: dict[str, str]) -> None:
    configure(environ, "hpc-login")
    profile = read_profile(environ, "hpc")
    assert profile is not None
    assert list(profile.entries) == ["launcher"]


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ("{host: hpc, hots: 3}", 'unknown key. Did you mean "host"?'),
        ("{venv: ~/torch}", "names no host"),
        ('"hpc[1-2]"', "hpc[1-2] is a set of hosts, expected one"),
        ("{host: hpc, venv: ~/a, conda: b}", "has both venv and conda, expected one of them"),
        ("{host: hpc, runs_dir: runs}", 'found "runs", expected a path on the hosts'),
        ('"-oProxyCommand=x"', "expected a host"),
        ("{host: hpc, host_key: x}", "unknown key"),
        ("", "found an empty value, expected the name of a host"),
        ("[a, b]", "found a list, expected the name of a host"),
    ],
)
def test_a_wrong_login_node_is_reported_at_its_line(environ: dict[str, str], login: str, words: str) -> None:
    configure(environ, login)
    with pytest.raises(SpecError) as caught:
        read_profile_login(environ, "hpc")
    assert [words in problem.message and problem.line == 2 for problem in caught.value.problems] == [True]


def note(runs_dir: Path, run: str, created_ns: int = 1) -> None:
    write_sent_run(runs_dir, SentRun(run=run, profile="hpc", secrets=(), created_ns=created_ns))


def make_run(runs_dir: Path, run: str, created_ns: int) -> None:
    (runs_dir / run).mkdir(parents=True)
    write_json(runs_dir / run / "run.json", {"created_ns": created_ns})
    write_json(runs_dir / run / "plan.json", sealed({"run": run}))


def test_a_record_of_an_earlier_version_is_read_and_sends_no_secrets(tmp_path: Path, environ: dict[str, str]) -> None:
    configure(environ, "hpc-login")
    login = {"host": "hpc-login", "host_key": f"SHA256:{'A' * 43}", "runs_dir": "/scratch/ana"}
    record = {"run": "a-1", "profile": "hpc", "login": login, "secrets": ["KEY"], "created_ns": 1, "seal": "ab"}
    (tmp_path / ".login").mkdir()
    write_json(tmp_path / ".login" / "a-1.json", record)
    found = find_sent_run(tmp_path, "a-1")
    assert found is not None
    node = found.node(environ)
    assert (node.profile, node.login.host, node.secrets) == ("hpc", "hpc-login", ())


@pytest.mark.parametrize(
    ("name", "run"), [("brisk-otter-3", "brisk-otter-3"), ("brisk", "brisk-otter-3"), ("calm", None)]
)
def test_a_run_elsewhere_is_found_by_its_name(tmp_path: Path, name: str, run: str | None) -> None:
    note(tmp_path, "brisk-otter-3")
    found = find_sent_run(tmp_path, name)
    assert (found and found.run) == run


def test_a_run_of_a_sweep_elsewhere_is_found_by_its_own_name(tmp_path: Path) -> None:
    note(tmp_path, "brisk-otter-3")
    found = find_sent_run(tmp_path, "brisk-otter-3.7")
    assert found is not None
    assert found.name_there("brisk-otter-3.7") == "brisk-otter-3.7"


@pytest.mark.parametrize(("here_ns", "elsewhere"), [(1, True), (3, False)])
def test_the_newest_run_is_here_or_elsewhere(tmp_path: Path, here_ns: int, elsewhere: bool) -> None:
    note(tmp_path, "brisk-otter-3", created_ns=2)
    make_run(tmp_path, "calm-fox-1", here_ns)
    assert (find_sent_run(tmp_path, "@last") is not None) == elsewhere


def test_a_beginning_that_may_mean_a_run_here_or_elsewhere_is_refused(tmp_path: Path) -> None:
    note(tmp_path, "brisk-otter-3")
    make_run(tmp_path, "brisk-fox-1", 1)
    with pytest.raises(
        UsageError, match="brisk: 2 runs begin with it: brisk-otter-3 with profile hpc, brisk-fox-1 here"
    ):
        find_sent_run(tmp_path, "brisk")


def test_a_run_here_is_meant_by_its_whole_name(tmp_path: Path) -> None:
    note(tmp_path, "brisk-otter-31")
    make_run(tmp_path, "brisk-otter-3", 1)
    assert find_sent_run(tmp_path, "brisk-otter-3") is None


@pytest.mark.parametrize("name", ["../x", "", ".login", "a/b", "a\nb"])
def test_what_a_host_gives_for_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ClusterddpError, match="which is not valid"):
        note(tmp_path, name)


def test_git_does_not_see_what_is_noted(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    note(tmp_path / "runs", "brisk-otter-3")
    assert subprocess.check_output(["git", "-C", str(tmp_path), "status", "--porcelain"]) == b""


def test_the_files_that_a_spec_is_laid_over_go_to_the_login_node_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("clusterddp.yaml", "restarts: 2\n"), ("site.yaml", "hang: fail\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    (tmp_path / "job.yaml").write_text("name: a\n")
    environ = {"CLUSTERDDP_CONFIG": "", "CLUSTERDDP_SITE": str(tmp_path / "site.yaml")}
    resolved = load_spec(tmp_path / "job.yaml", environ=environ)
    sent = plan_command(resolved, [], {}, runs_dir=tmp_path / "runs", environ=environ, discard=True)
    files = {"spec.yaml": "name: a\n", "config.yaml": "", "project.yaml": "restarts: 2\n", "site.yaml": "hang: fail\n"}
    assert sent.files == files
    assert sent.variables["CLUSTERDDP_PROJECT"] == {"file": "project.yaml"}
    assert sent.variables["CLUSTERDDP_SITE"] == {"file": "site.yaml"}
