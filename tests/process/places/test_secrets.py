"""Values of secrets: what is warned of, and that none is left anywhere when a run has ended."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clusterddp.errors import RunFailedError
from clusterddp.run.find import list_runs
from tests.support.launch_runs import plan_text
from tests.support.slurm_person import HELD, SlurmPerson
from tests.support.ssh_place import SshPlace
from tests.support.waiting import PATIENCE
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

CANARY = "canary-7f3a91-b2"
PROOF = "import os, sys\nprint(os.environ['API_KEY'][::-1])\nsys.exit(int(os.environ['RANK']) * 3)\n"


def find_canary(*places: Path | str) -> list[str]:
    """Name the files that hold the secret's value."""
    argv: Sequence[str] = ["grep", "-rl", "--binary-files=text", "--devices=skip", CANARY, *map(str, places)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()


def notes_about(tmp_path: Path, variable: str) -> list[str]:
    (tmp_path / "entry.py").touch()
    text = f"name: job\nresources: {{procs_per_node: 1}}\nentry: {{script: entry.py}}\nenv:\n  {variable}\n"
    return [note for note in plan_text(text, tmp_path).notes if "secret" in note]


@pytest.mark.parametrize(
    "variable",
    [
        "WANDB_API_KEY: 3fa9c1d2",
        "db_password: hunter22",
        "AWS_CREDENTIALS: abc:def",
        "X: ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "X: hf_abcdefghijABCDEFGHIJ0123456789abcd",
        "X: sk-proj-0123456789abcdefghij",
        "X: AKIAIOSFODNN7EXAMPLE",
        "X: https://ana:hunter2@proxy",
    ],
)
def test_a_value_that_looks_like_a_secret_is_warned_of_with_its_place(tmp_path, variable):
    (note,) = notes_about(tmp_path, variable)
    name, _, value = variable.partition(": ")
    assert ":5:" in note
    assert f"env.{name} looks like a secret" in note
    assert f"secrets: [{name}]" in note
    assert value not in note


@pytest.mark.parametrize(
    "variable",
    ["TOKENIZERS_PARALLELISM: false", "MAX_TOKENS: 512", "SSH_AUTH_SOCK: /run/x", "X: skating", "A: hf_home"],
)
def test_a_value_that_only_sounds_like_one_is_not(tmp_path, variable):
    assert notes_about(tmp_path, variable) == []


def test_a_local_run_that_failed_has_left_its_secret_nowhere(tmp_path):
    (tmp_path / "entry.py").write_text(PROOF)
    (tmp_path / "job.yaml").write_text(
        "name: job\nresources: {procs_per_node: 2}\nentry: {script: entry.py}\nsecrets: [API_KEY]\n"
    )
    homes = {name: str(tmp_path / name) for name in ("HOME", "XDG_STATE_HOME", "TMPDIR")}
    for home in homes.values():
        Path(home).mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "clusterddp", "submit", "job.yaml", "--wait"],
        cwd=tmp_path,
        env=os.environ | homes | {"API_KEY": CANARY},
        timeout=60 * PATIENCE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == RunFailedError.exit_code, done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert run.attempt(0).stdout(0).read_text() == f"{CANARY[::-1]}\n"
    assert CANARY not in done.stdout + done.stderr
    assert find_canary(tmp_path) == []


@pytest.mark.root
def test_a_run_over_ssh_that_failed_has_left_its_secret_on_no_host(ssh_place: SshPlace):
    (ssh_place.path / "entry.py").write_text(PROOF)
    spec = (
        "name: job\nlauncher: ssh\nssh: {hosts: [node1, node2]}\nresources: {procs_per_node: 1}\n"
        "entry: {script: entry.py}\nsecrets: [API_KEY]\n"
    )
    (ssh_place.path / "job.yaml").write_text(spec)
    ssh_place.clusterddp("submit", "job.yaml", environ={"API_KEY": CANARY})
    ssh_place.await_state("FAILED")
    there = ssh_place.host_run_dir("node1").attempt(0).stdout(0)
    assert there.read_text() == f"{CANARY[::-1]}\n"
    disks = [ssh_place.rack.outside(node, "/") for node in ("node1", "node2")]
    assert find_canary(ssh_place.path, ssh_place.rack.home(HEAD), *disks) == []


@pytest.fixture
def person(rack: Rack) -> Iterator[SlurmPerson]:
    person = SlurmPerson(rack=rack, checks=False, path=Path(tempfile.mkdtemp(dir=rack.dir / "shared")))
    yield person
    rack.run(HEAD, ["scancel", "--user=root"], check=False)


@pytest.mark.root
@pytest.mark.parametrize("look", ["status", "list", "wait"])
def test_the_secret_of_a_job_that_was_cancelled_in_the_queue_goes_with_the_next_look(person: SlurmPerson, look: str):
    person.write_spec(f"{HELD}\nsecrets: [API_KEY]")
    person.clusterddp("submit", "job.yaml", environ={"API_KEY": CANARY})
    assert find_canary(person.rack.dir) == [str(person.run_dir().job_secrets)]
    person.clusterddp("status", "@last")
    assert person.run_dir().job_secrets.exists()
    person.slurm("scancel", str(person.record().job_id))
    person.clusterddp(look, *(["@last"] if look != "list" else []))
    assert find_canary(person.rack.dir) == []
