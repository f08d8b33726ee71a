"""Submitting to a real Slurm: what is queued, what Slurm receives, and what it never receives."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.job_tag import job_tag
from clusterddp.run.record import write_run
from clusterddp.system.files import read_json
from tests.support.paths import ROOT
from tests.support.slurm_person import SlurmPerson
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
CANARY = "canary-7f3a91"


@pytest.fixture
def person(rack: Rack) -> Iterator[SlurmPerson]:
    place = Path(tempfile.mkdtemp(dir=rack.dir / "shared"))
    person = SlurmPerson(rack=rack, checks=False, path=place)
    person.write_spec()
    yield person
    rack.run(HEAD, ["scancel", "--user=root"], check=False)


def test_a_job_carries_its_tag_in_name_and_comment(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "job.yaml", "-o", "json")
    record = person.record()
    run_dir = str(person.run_dir().path)
    submitted = {"run": record.run, "launcher": "slurm", "job_id": record.job_id, "run_dir": run_dir}
    assert json.loads(done.stdout) == {"schema": 1} | submitted
    assert record.job_tag == job_tag(record.token, 0)
    job = person.job(str(record.job_id))
    assert job["JobName"] == f"job.{record.job_tag}"
    assert f"Comment=clusterddp {record.run} {record.job_tag}" in person.slurm("scontrol", "show", "job", job["JobId"])


def test_slurm_receives_the_size_of_the_job_and_the_path_of_its_log(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml", "resources.cpus_per_task=3", "resources.memory_gb=1.5", "resources.time=90")
    job = person.job(str(person.record().job_id))
    launcher = str(person.run_dir().launcher_dir)
    assert (job["NumNodes"], job["NumTasks"], job["CPUs/Task"]) == ("2-2", "4", "3")
    assert (job["MinMemoryNode"], job["TimeLimit"]) == ("1.50G", "01:30:00")
    assert (job["WorkDir"], job["StdOut"]) == (launcher, f"{launcher}/job.log")
    assert job["StdErr"] in {f"{launcher}/job.log", ""}  # empty in Slurm 26.05, which puts both into one file


def test_gpus_are_asked_for(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml", "resources.gpus_per_node=2")
    assert person.job(str(person.record().job_id))["TresPerNode"] in {"gpu:2", "gres:gpu:2", "gres/gpu:2"}


def test_what_is_planned_is_what_is_submitted(person: SlurmPerson) -> None:
    spy = 'printf "%s\\0" "$@" > argv; exec /usr/bin/sbatch "$@"'
    person.clusterddp("submit", "job.yaml", "slurm.comment=a 'b' $(c)", environ=person.wrap_sbatch(spy))
    given = (person.path / "argv").read_text().split("\0")[:-1]
    plan = read_json(person.run_dir().plan)
    assert plan is not None
    script = str(person.run_dir().launcher_dir / "slurm_job.sh")
    assert given == [*plan["slurm"]["sbatch"][1:], script, *plan["slurm"]["arguments"]]
    assert Path(script).read_text() == plan["slurm"]["script"] == (ROOT / "templates/slurm_job.sh").read_text()


@pytest.mark.parametrize("name", ["a b", "it's", '"quoted"', "$(touch hit)", "`touch hit`", "a;b&c", "ü*?"])
def test_a_directory_with_an_odd_name_is_data(person: SlurmPerson, name: str) -> None:
    place = person.path / name
    place.mkdir()
    odd = SlurmPerson(rack=person.rack, checks=False, path=place)
    odd.write_spec("")
    done = odd.clusterddp("submit", "job.yaml")
    assert done.returncode == 0, done.stderr
    log = odd.run_dir().launcher_dir / "job.log"
    wait_until(lambda: odd.jobs() and odd.jobs()[0][1] not in {"PENDING", "RUNNING", "COMPLETING"})
    assert log.exists()
    assert "not found" not in log.read_text()
    assert not list(person.path.rglob("hit"))


def test_a_run_in_a_directory_with_the_worst_of_names_completes_and_its_secret_is_gone(person: SlurmPerson) -> None:
    place = person.path / "a b'c\"d$(touch hit)`touch hit`;e&f*ü"
    place.mkdir()
    odd = SlurmPerson(rack=person.rack, checks=False, path=place)
    odd.write_spec("secrets: [API_KEY]\nenv: {ODD: '$(touch hit) %j \\'}", resources="{procs_per_node: 2}")
    (place / "entry.py").write_text("import os\nprint(os.environ['API_KEY'][::-1], os.environ['ODD'])\n")
    done = odd.clusterddp("submit", "job.yaml", "--wait", environ={"API_KEY": CANARY})
    assert done.returncode == 0, done.stderr
    assert odd.clusterddp("logs").stdout == f"{CANARY[::-1]} $(touch hit) %j \\\n"
    assert not list(person.path.rglob("hit"))
    assert not odd.run_dir().job_secrets.exists()
    search = ["grep", "-rl", "--binary-files=text", CANARY, str(person.path), str(person.rack.dir / "state")]
    assert subprocess.run(search, capture_output=True, text=True, check=False).stdout == ""


def test_a_run_that_waits_has_nothing_to_save_and_is_cancelled(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml")
    assert person.clusterddp("cancel", "--save", "@last").returncode == 0
    assert person.jobs() == [(person.record().job_id, "CANCELLED")]


def test_variables_of_the_submitting_shell_do_not_change_the_job(person: SlurmPerson) -> None:
    environ = {
        "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SBATCH_OUTPUT": "/tmp/%j", "SBATCH_REQUEUE": "1",
        "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "0-3", "SRUN_EXPORT_ENV": "NONE", "PMI_RANK": "3",
    }  # fmt: skip
    done = person.clusterddp("submit", "job.yaml", environ=environ)
    job = person.job(str(person.record().job_id))
    assert (job["NumNodes"], job["StdOut"]) == ("2-2", f"{person.run_dir().launcher_dir}/job.log")
    assert "ArrayTaskId" not in job
    assert "SBATCH_OUTPUT in your environment is overridden" in done.stderr


def test_an_exported_partition_is_honoured_and_named(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "job.yaml", environ={"SBATCH_PARTITION": "high"})
    assert person.job(str(person.record().job_id))["Partition"] == "high"
    assert "--partition=high comes from SBATCH_PARTITION in your environment" in done.stderr


def test_the_environment_that_goes_along_is_an_allow_list(person: SlurmPerson) -> None:
    environ = {
        "NCCL_DEBUG": "INFO", "CUDA_HOME": "/cuda", "CUDA_VISIBLE_DEVICES": "3", "SSH_AUTH_SOCK": "/tmp/s",
        "HF_TOKEN": CANARY, "WANDB_API_KEY": CANARY, "WANDB_MODE": "offline", "RANK": "4", "MY_OWN": "x",
        "https_proxy": f"http://ana:{CANARY}@proxy",
    }  # fmt: skip
    person.clusterddp("submit", "job.yaml", environ=environ)
    variables = read_json(person.run_dir().job_environment)
    assert variables is not None
    assert {name for name in environ if name in variables} == {"NCCL_DEBUG", "CUDA_HOME", "WANDB_MODE"}
    assert (person.run_dir().job_environment.stat().st_mode & 0o777) == 0o600
    assert CANARY not in json.dumps(variables)


def test_a_secret_is_in_its_file_and_nowhere_else(person: SlurmPerson) -> None:
    person.write_spec("slurm: {hold: true}\nsecrets: [API_KEY]")
    spy = 'printf "%s\\0" "$@" >argv; exec /usr/bin/sbatch "$@"'
    environ = {"API_KEY": CANARY, **person.wrap_sbatch(spy)}
    done = person.clusterddp("submit", "job.yaml", environ=environ)
    run = person.run_dir()
    job = person.slurm("scontrol", "show", "job", str(person.record().job_id))
    script = person.slurm("scontrol", "write", "batch_script", str(person.record().job_id), "-")
    assert CANARY not in done.stdout + done.stderr + job + script
    person.slurm("scontrol", "reconfigure")
    found = subprocess.run(
        ["grep", "-rl", "--binary-files=text", CANARY, str(person.rack.dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split() == [str(run.job_secrets)]
    assert (run.job_secrets.stat().st_mode & 0o777) == 0o600
    person.clusterddp("cancel", run.name)
    assert not run.job_secrets.exists()


def test_the_dry_run_asks_the_scheduler_and_writes_nothing(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "job.yaml", "-n", "-o", "json", "slurm.hold=false")
    verdict = json.loads(done.stdout)["scheduler"]
    assert (done.returncode, verdict["accepted"]) == (0, True)
    assert verdict["start"][:2] == "20"
    assert verdict["nodes"].startswith("node[")
    assert not person.runs_dir.exists()
    alone = ("slurm.hold=false", "slurm.exclusive=true")
    shown = " ".join(person.clusterddp("submit", "job.yaml", "-n", *alone).stdout.split())
    assert "scheduler accepts it: Job" in shown
    assert shown.endswith("; 32 cores on each node, 16 for each rank")


def test_the_dry_run_prints_a_refusal_in_slurms_words(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "job.yaml", "-n", "resources.nodes=99")
    assert done.returncode == 3
    assert "plan for" in done.stdout
    assert "scheduler refuses it: sbatch: allocation failure: " in done.stdout


def test_the_dry_run_works_where_there_is_no_scheduler(person: SlurmPerson) -> None:
    python = Path(sys.executable).parent
    done = person.clusterddp("submit", "job.yaml", "-n", environ={"PATH": str(python)})
    assert done.returncode == 0
    assert "scheduler was not asked: sbatch: no such command here" in done.stdout


def test_a_job_that_slurm_refuses_is_the_end_of_the_run_in_slurms_words(person: SlurmPerson) -> None:
    done = person.clusterddp("submit", "job.yaml", "slurm.partition=nope")
    assert done.returncode == 3
    assert "was not submitted: sbatch: invalid partition specified: nope" in done.stderr
    assert "hint: slurm.partition=NAME; sinfo -s lists the cluster's" in done.stderr
    end = person.end()
    assert end is not None
    assert (end.outcome, "invalid partition specified: nope" in end.reason) == ("FAILED", True)
    assert person.jobs() == []


def test_a_job_waits_for_another_run(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml")
    first = person.record()
    person.clusterddp("submit", "job.yaml", "slurm.hold=false", f"after=[{first.run}]")
    job = person.job(str(person.record().job_id))
    assert job["Dependency"] == f"afterok:{first.job_id}(unfulfilled)"


def test_a_job_that_waits_is_cancelled_at_once_and_its_end_recorded(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml")
    done = person.clusterddp("cancel", "@last")
    assert (done.returncode, "cancelled" in done.stderr) == (0, True)
    assert person.jobs() == [(person.record().job_id, "CANCELLED")]
    assert person.status()["state"] == "CANCELLED"


def test_a_job_id_that_slurm_gave_to_another_job_is_never_cancelled(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml")
    ours = person.record()
    strangers = person.slurm("sbatch", "--parsable", "--hold", "--wrap=true").strip()
    write_run(person.run_dir(), dataclasses.replace(ours, job_id=strangers))
    person.clusterddp("cancel", "@last")
    assert person.job(strangers)["JobState"] == "PENDING"
    assert person.jobs() == [(ours.job_id, "CANCELLED")]


def test_resume_submits_a_new_job_with_a_tag_of_its_own(person: SlurmPerson) -> None:
    person.clusterddp("submit", "job.yaml", "restarts=1")
    person.clusterddp("cancel", "@last")
    first = person.record()
    done = person.clusterddp("resume", "@last")
    again = person.record()
    assert done.returncode == 0, done.stderr
    assert (again.base_attempt, again.job_attempt, again.job_tag) == (1, 1, job_tag(first.token, 1))
    assert person.jobs() == [(again.job_id, "PENDING")]
    assert person.job(str(again.job_id))["Requeue"] == "1"


def test_a_user_who_has_no_name_cancels_a_job(person: SlurmPerson) -> None:
    """As in a container, or while the directory service is down."""
    os.chown(person.path, 54_321, 54_321)
    became = [
        "setpriv",
        "--reuid=54321",
        "--regid=54321",
        "--clear-groups",
        "env",
        f"HOME={person.path}",
        f"XDG_STATE_HOME={person.path}",
    ]

    def clusterddp(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [*became, *person.command(*arguments)]
        return person.rack.run(HEAD, argv, cwd=person.path, env=person.variables(), check=False, timeout_s=150)

    done = clusterddp("submit", "job.yaml")
    assert done.returncode == 0, done.stderr
    done = clusterddp("cancel", "@last")
    assert (done.returncode, person.job(str(person.record().job_id))["JobState"]) == (0, "CANCELLED"), done.stderr
