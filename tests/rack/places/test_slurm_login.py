"""Slurm from a laptop through a login node: the head of a rack is the laptop, node1 the login node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib

from clusterddp.cli.login_command import NEEDS
from tests.support.paths import ROOT
from tests.support.slurm_person import SlurmPerson
from tests.support.ssh_person import Sshd, own_ssh_dir
from tests.support.ssh_place import send
from tests.support.typist import typing_into
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

ENTRY = """\
import os, pathlib, sys, time
print("here", os.environ.get("WHAT", ""), pathlib.Path("words.txt").read_text().strip(), flush=True)
go = pathlib.Path(sys.argv[1])
while len(sys.argv) > 2 and not go.exists():
    time.sleep(0.1)
if go.exists() and go.read_text() == "fail":
    sys.exit(9)
"""


@pytest.fixture(scope="module")
def cluster(needs_rack: None) -> Iterator[Rack]:
    with running_rack(RackPlan(nodes=["node1", "node2"], gpus_per_host=0)) as rack:
        yield rack


class Laptop(SlurmPerson):
    """A directory with code that git knows, and a configuration."""

    @property
    def go(self) -> Path:
        """What a job waits for."""
        return self.rack.dir / "shared" / f"go-{self.path.name}"

    @property
    def there(self) -> Path:
        """What is its own on the login node: the runs; and everything, if it is configured so."""
        return self.rack.dir / "home" / "root" / f".{self.path.name}"

    def configure(
        self, more: str = "", *, python: str = sys.executable, host: str = "node1", shares: bool = True
    ) -> None:
        directory = ".clusterddp" if shares else self.there.name
        login = f"{{host: {host}, python: {python}, dir: ~/{directory}, runs_dir: ~/{self.there.name}/r}}"
        text = f"profiles:\n  hpc:\n    launcher: slurm\n    login: {login}\n{more}"
        (self.path / "config.yaml").write_text(text)

    def spec(self, *, waits: bool = False, more: str = "") -> None:
        entry = f"{{script: entry.py, args: [{self.go}{', wait' if waits else ''}]}}"
        text = f"name: job\nresources: {{procs_per_node: 1}}\ndevice: cpu\nentry: {entry}\n{more}\n"
        (self.path / "job.yaml").write_text(text)

    def ok(self, *arguments: str, **options: Any) -> str:
        done = self.clusterddp(*arguments, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, *arguments: str, **options: Any) -> str:
        return self.ok("submit", "job.yaml", "--profile", "hpc", *arguments, **options)

    def state_of(self, run: str) -> str:
        return str(json.loads(self.ok("status", run, "-o", "json"))["state"])

    def await_state_of(self, run: str, state: str) -> None:
        wait_until(lambda: self.state_of(run) == state, within_s=60)

    def file_there(self, run: str, name: str) -> Any:
        return json.loads((self.there / "r" / run / name).read_text())


@pytest.fixture
def laptop(cluster: Rack) -> Iterator[Laptop]:
    place = cluster.dir / "home" / f"laptop-{uuid.uuid4().hex[:8]}"
    place.mkdir()
    laptop = Laptop(rack=cluster, checks=False, path=place, environ={"CLUSTERDDP_CONFIG": str(place / "config.yaml")})
    laptop.configure()
    laptop.spec()
    (place / "entry.py").write_text(ENTRY)
    (place / "words.txt").write_text("as sent\n")
    (place / ".gitignore").write_text("runs\n")
    git(place, "init", "-q")
    yield laptop
    cluster.run("head", ["scancel", "-u", "root"])


def git(place: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=ana", "-c", "user.email=ana@example.org"]
    return subprocess.check_output(["git", "-C", str(place), *identity, *arguments], text=True).strip()


def test_a_job_is_submitted_on_the_login_node(laptop: Laptop) -> None:
    run = laptop.submit("slurm.hold=true")
    assert laptop.file_there(run, "env.json")["host"] == "node1"


def test_a_run_is_waited_for_and_its_log_follows_the_name(laptop: Laptop) -> None:
    name, *log = laptop.submit("--follow").splitlines()
    assert (laptop.state_of(name), log) == ("COMPLETED", ["here  as sent"])


def test_the_next_commands_find_a_run_without_the_profile(laptop: Laptop) -> None:
    run = laptop.submit("--wait")
    assert [laptop.ok("logs", name) for name in (run, run[:-1], "@last")] == ["here  as sent"] * 3


def test_a_hold_is_kept_from_a_laptop(laptop: Laptop) -> None:
    hold = laptop.ok("hold", "job.yaml", "--for", "10m", "--profile", "hpc")
    laptop.await_state_of(hold, "RUNNING")
    (laptop.path / "words.txt").write_text("sent later\n")
    run = laptop.submit("--in", hold, "--wait")
    assert (laptop.ok("logs", run), laptop.state_of(hold)) == ("here  sent later", "RUNNING")
    laptop.ok("cancel", hold)
    laptop.await_state_of(hold, "CANCELLED")


def test_a_list_says_where_the_other_runs_are(laptop: Laptop) -> None:
    run = laptop.submit("slurm.hold=true")
    assert "1 run is on the cluster of profile hpc: clusterddp list --profile hpc" in laptop.clusterddp("list").stderr
    assert run in laptop.ok("list", "--profile", "hpc")


def test_a_report_and_a_comparison_are_made_where_the_runs_are(laptop: Laptop) -> None:
    runs = [laptop.submit("--wait"), laptop.submit("--wait", "env.WHAT=other")]
    laptop.ok("report", *runs, "--out", "both.html")
    page = (laptop.path / "both.html").read_text()
    assert page.startswith("<!doctype html>")
    assert all(run in page for run in runs)
    found = json.loads(laptop.ok("compare", *runs, "-o", "json"))
    assert found["differences"]["spec"] == {"env.WHAT": {runs[0]: None, runs[1]: "other"}}


def test_the_exit_code_reports_how_a_run_ended(laptop: Laptop) -> None:
    laptop.go.write_text("fail")
    run = laptop.submit()
    assert laptop.clusterddp("wait", run).returncode == 5


def test_a_run_is_cancelled_and_resumed(laptop: Laptop) -> None:
    laptop.spec(waits=True)
    run = laptop.submit()
    laptop.await_state_of(run, "RUNNING")
    laptop.ok("cancel", run)
    assert laptop.clusterddp("wait", run).returncode == 6
    laptop.go.write_text("go")
    laptop.ok("resume", run, "--wait")
    assert json.loads(laptop.ok("status", run, "-o", "json"))["attempt"] == 1


def test_a_run_is_repeated_with_the_code_that_was_sent(laptop: Laptop) -> None:
    run = laptop.submit("--wait")
    (laptop.path / "words.txt").write_text("changed\n")
    assert laptop.ok("submit", run, "--follow").splitlines()[1:] == ["here  as sent"]


def test_ctrl_c_leaves_the_run_alone(laptop: Laptop) -> None:
    laptop.spec(waits=True)
    process = laptop.start("submit", "job.yaml", "--profile", "hpc", "--wait")
    assert process.stdout
    assert process.stderr
    run = process.stdout.readline().strip()
    wait_until(lambda: "RUNNING" in process.stderr.readline())
    send(process, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, laptop.state_of(run)) == (130, "RUNNING")
    assert f"detached; the run goes on. cancel: clusterddp cancel {run}" in said


def test_a_cut_connection_does_not_touch_the_run(laptop: Laptop) -> None:
    laptop.spec(waits=True)
    with own_ssh_dir(laptop.rack) as person, person.sshd("node1") as sshd:
        person.configure(f"Host login\n  Hostname node1\n  Port {sshd.port}\n")
        key = f"[node1]:{sshd.port} {person.host_key('node1')}\n"
        person.known_hosts.write_text(person.known_hosts.read_text() + key)
        laptop.configure(host="login")
        run = laptop.submit()
        laptop.await_state_of(run, "RUNNING")
        process = laptop.start("wait", run)
        assert process.stderr
        wait_until(lambda: "RUNNING" in process.stderr.readline())
        pid = Path(f"{laptop.rack.dir}/shared/sshd-{sshd.port}.pid").read_text().strip()
        # Newer ones have two processes for a session.
        script = (
            'first=$(pgrep -P "$1"); kill -KILL $first $(for each in $first; do pgrep -P $each -x sshd-session; done)'
        )
        laptop.rack.run("node1", ["sh", "-c", script, "sh", pid])
        _, said = process.communicate(timeout=240)
    assert process.returncode == 3
    assert "the connection broke; the run goes on" in said
    laptop.configure()
    laptop.go.write_text("go")
    assert laptop.clusterddp("wait", run, "--profile", "hpc").returncode == 0


def test_a_command_and_a_shell_are_beside_a_rank_of_the_cluster(laptop: Laptop) -> None:
    laptop.configure(shares=False)
    laptop.spec(waits=True, more="env: {SHELL: /bin/sh}")
    run = laptop.submit()
    laptop.await_state_of(run, "RUNNING")
    wait_until(lambda: laptop.clusterddp("exec", run, "--", "true").returncode == 0)
    done = laptop.clusterddp("exec", run, "--", "sh", "-c", 'cat; echo "$SLURM_JOB_ID"; exit 7', stdin="typed\n")
    assert (done.stdout.splitlines()[0], done.returncode) == ("typed", 7)
    (package,) = [path for path in (laptop.there / "packages").iterdir() if path.is_dir()]
    package.rename(laptop.there / "gone")
    argv = laptop.command("exec", run)
    shell = laptop.rack.argv(HEAD, argv, cwd=laptop.path, env={**laptop.variables(), "TERM": "vt100"})
    with typing_into(shell) as person:
        person.await_text("# ")
        person.type("echo job $SLURM_JOB_ID $TERM; sleep 600\n")
        person.await_text(f"job {done.stdout.splitlines()[1]} vt100")
        person.type("\x03exit 5\n")
        assert person.await_exit() == 5
    laptop.ok("cancel", run)


@pytest.fixture
def second_factor(laptop: Laptop) -> Iterator[Sshd]:
    """Let the login node ask for a key and then, by PAM, for a password."""
    check = laptop.rack.dir / "shared" / f"check-{laptop.path.name}"
    check.write_text("#!/bin/sh\n[ \"$(tr -d '\\0')\" = opensesame ]\n")
    check.chmod(0o755)
    checked = f"auth required pam_exec.so expose_authtok {check}\n"
    pam = check.with_suffix(".pam")
    pam.write_text(checked + "".join(f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "session")))
    laptop.rack.run("node1", ["mount", "--bind", str(pam), "/etc/pam.d/sshd"])
    options = ("UsePAM=yes", "KbdInteractiveAuthentication=yes", "PermitRootLogin=yes")
    methods = "AuthenticationMethods=publickey,keyboard-interactive"
    try:
        with own_ssh_dir(laptop.rack) as person, person.sshd("node1", *options, methods) as sshd:
            person.configure(
                f"Host login\n  Hostname node1\n  Port {sshd.port}\n"
                "  ControlMaster auto\n  ControlPath ~/.ssh/%C\n  ControlPersist 600\n"
            )
            key = f"[node1]:{sshd.port} {person.host_key('node1')}\n"
            person.known_hosts.write_text(person.known_hosts.read_text() + key)
            laptop.configure(host="login")
            yield sshd
            laptop.rack.run(HEAD, ["ssh", "-O", "exit", "login"], check=False)
    finally:
        laptop.rack.run("node1", ["umount", "/etc/pam.d/sshd"])


def test_without_a_login_that_is_open_and_without_a_terminal_it_says_what_to_type(
    laptop: Laptop, second_factor: Sshd
) -> None:
    process = laptop.start("list", "--profile", "hpc")  # a session of its own, so no terminal that ssh could ask on
    _, said = process.communicate(timeout=240)
    assert process.returncode == 3
    assert "login: connect: ssh did not log in" in said
    assert "hint: type `ssh login`, which shows why; where it asks for a password or a code" in said
    assert "Accepted keyboard-interactive" not in second_factor.log.read_text()


def test_a_terminal_is_asked_for_the_second_factor_once_and_then_nobody(laptop: Laptop, second_factor: Sshd) -> None:
    argv = laptop.rack.argv(HEAD, laptop.command("list", "--profile", "hpc"), cwd=laptop.path, env=laptop.variables())
    with typing_into(argv) as person:
        modes = person.modes()
        person.await_text("Password:")
        person.type("\x03")
        person.await_exit()  # of what leads into the rack, which the key ends, too
        wait_until(lambda: person.modes() == modes)
    with typing_into(argv) as person:
        person.await_text("Password:")
        person.type("opensesame\n")
        assert person.await_exit() == 0
    process = laptop.start("submit", "job.yaml", "--profile", "hpc", "--follow")
    printed, said = process.communicate(timeout=240)
    assert (process.returncode, printed.splitlines()[1:]) == (0, ["here  as sent"]), said
    assert second_factor.log.read_text().count("Accepted keyboard-interactive") == 1


def test_what_the_login_node_lacks_is_named_with_the_command_that_installs_it(laptop: Laptop) -> None:
    bare = laptop.rack.dir / "shared" / f"bare-{laptop.path.name}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    laptop.configure(python=f"{bare}/bin/python")
    done = laptop.clusterddp("submit", "job.yaml", "--profile", "hpc")
    assert done.returncode == 3
    assert f"there: {bare}/bin/python -m pip install 'click>=8.1.7,<9'" in done.stderr


def test_an_unknown_host_key_stops_before_anything_is_said(laptop: Laptop) -> None:
    with own_ssh_dir(laptop.rack) as person:
        person.known_hosts.write_text("")
        done = laptop.clusterddp("status", "some-run-1", "--profile", "hpc")
    assert done.returncode == 3
    assert "Host key verification failed" in done.stderr


def test_names_and_values_are_no_shell_text(laptop: Laptop) -> None:
    canary = laptop.rack.dir / "shared" / "canary"
    evil = f"$(touch {canary})`touch {canary}`; touch {canary} '\""
    laptop.spec(more=f"secrets: [TOKEN]\nenv: {{WHAT: {json.dumps(evil)}}}")
    (laptop.path / "job.yaml").rename(laptop.path / "$(touch canary).yaml")
    done = laptop.clusterddp(
        "submit", "$(touch canary).yaml", "--profile", "hpc", "--follow", "--", environ={"TOKEN": evil}
    )
    assert evil in done.stdout
    assert laptop.clusterddp("status", evil, "--profile", "hpc").returncode == 4
    assert not canary.exists()


def test_a_secret_travels_and_lies_in_nothing_that_was_sent(laptop: Laptop) -> None:
    laptop.configure(shares=False)
    (laptop.path / "entry.py").write_text("import os; print(os.environ['MY_KEY'][::-1])")
    laptop.spec(more="secrets: [MY_KEY]")
    log = laptop.submit("--follow", environ={"MY_KEY": "hunter2-hunter2"}).splitlines()[1:]
    assert log == ["2retnuh-2retnuh"]
    found = [path for path in laptop.there.rglob("*") if path.is_file() and b"hunter2-hunter2" in path.read_bytes()]
    assert found == []


def test_a_resumed_run_gets_its_secret_again(laptop: Laptop) -> None:
    laptop.spec(waits=True, more="secrets: [WHAT]")
    run = laptop.submit(environ={"WHAT": "old"})
    laptop.await_state_of(run, "RUNNING")
    laptop.ok("cancel", run)
    laptop.go.write_text("go")
    laptop.ok("resume", run, "--wait", environ={"WHAT": "new"})
    assert laptop.ok("logs", run) == "here new as sent"


def test_a_plan_leaves_nothing_there(laptop: Laptop) -> None:
    laptop.configure(shares=False)
    laptop.submit("-n")
    assert list((laptop.there / "trees").iterdir()) == []


def test_code_is_taken_from_where_one_is_in_the_repository(laptop: Laptop) -> None:
    below = laptop.path / "deep" / "er"
    below.mkdir(parents=True)
    (below / "words.txt").write_text("deeper\n")
    for name in ("entry.py", "job.yaml"):
        (laptop.path / name).rename(below / name)
    git(laptop.path, "add", ".")
    git(laptop.path, "commit", "-qm", "one")
    deeper = Laptop(rack=laptop.rack, checks=False, path=below, environ=laptop.environ)
    run, *log = deeper.submit("--follow").splitlines()
    assert log == ["here  deeper"]
    assert laptop.file_there(run, "env.json")["git"]["commit"] == git(laptop.path, "rev-parse", "HEAD")


def test_a_script_outside_of_git_may_lie_below(laptop: Laptop) -> None:
    place = laptop.rack.dir / "home" / f"plain-{laptop.path.name}"
    (place / "src").mkdir(parents=True)
    (place / "src" / "entry.py").write_text("import helper\n")
    (place / "src" / "helper.py").write_text("print('helped')\n")
    plain = Laptop(rack=laptop.rack, checks=False, path=place, environ=laptop.environ)
    (place / "job.yaml").write_text("name: job\ndevice: cpu\nentry: {script: src/entry.py}\n")
    assert plain.submit("--follow").splitlines()[1:] == ["helped"]


def test_packages_that_are_imported_from_a_directory_of_the_code_are_imported_there_too(laptop: Laptop) -> None:
    library = laptop.path / "lib" / "helper"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("print('helped from', __file__.rpartition('/code/')[2])\n")
    (laptop.path / "entry.py").write_text("import helper\n")
    _, *log = laptop.submit("--follow", environ={"PYTHONPATH": str(library.parent)}).splitlines()
    assert log == ["helped from lib/helper/__init__.py"]


def test_the_users_modules_do_not_take_the_place_of_pythons(laptop: Laptop) -> None:
    (laptop.path / "random.py").write_text("raise SystemExit('mine')\n")
    (laptop.path / "click.py").write_text("raise SystemExit('mine')\n")
    # Here, `python -m` would find them; who has clusterddp installed types its name.
    assert laptop.submit("-n", environ={"PYTHONSAFEPATH": "1"}).startswith("plan for")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("entry.script=/etc/passwd", 'entry.script: found "/etc/passwd", expected a path from the directory'),
        ("entry.script=~/entry.py", "its code is sent to the login node"),
    ],
)
def test_paths_of_the_laptop_are_refused_before_anything_is_sent(laptop: Laptop, change: str, words: str) -> None:
    laptop.configure(shares=False)
    (laptop.there.parent / "entry.py").touch()
    done = laptop.clusterddp("submit", "job.yaml", "--profile", "hpc", change)
    assert done.returncode == 2
    assert words in done.stderr
    assert not laptop.there.exists()


def test_data_of_the_laptop_is_refused(laptop: Laptop) -> None:
    laptop.configure(shares=False)
    (laptop.path / "job.yaml").write_text("name: job\ntrain: {data_dir: data}\n")
    done = laptop.clusterddp("submit", "job.yaml", "--profile", "hpc")
    assert done.returncode == 2
    assert 'train.data_dir: found "data", expected a path on the cluster' in done.stderr


def test_a_sweep_goes_there_whole(laptop: Laptop) -> None:
    sweep = laptop.submit("env.WHAT=a,b", "--sweep", "--wait")
    assert laptop.ok("logs", f"{sweep}.1") == "here b as sent"


def test_several_runs_are_cancelled_wherever_they_are(laptop: Laptop) -> None:
    runs = [laptop.submit("slurm.hold=true") for _ in range(2)]
    done = laptop.clusterddp("cancel", *runs, "no-such-run-1")
    assert done.returncode == 4
    assert [laptop.state_of(run) for run in runs] == ["CANCELLED"] * 2


def test_a_run_is_removed_there_and_forgotten_here(laptop: Laptop) -> None:
    run = laptop.submit("--wait")
    assert run in laptop.ok("list", run, "--wide")
    assert laptop.clusterddp("rm", run).returncode == 2
    assert (laptop.there / "r" / run).is_dir()
    laptop.ok("rm", run[:-1], "--yes")
    assert not (laptop.there / "r" / run).exists()
    assert "1 run is on" not in laptop.clusterddp("list").stderr


def test_a_spec_for_this_machine_stays_here(laptop: Laptop) -> None:
    laptop.configure("default_profile: hpc\n", shares=False)
    plan = json.loads(laptop.ok("submit", "job.yaml", "--launcher", "local", "-n", "-o", "json"))
    assert plan["launcher"] == "local"
    assert not laptop.there.exists()


def test_a_default_profile_is_asked_for_runs_that_are_not_known_here(laptop: Laptop) -> None:
    run = laptop.submit("slurm.hold=true")
    laptop.configure("default_profile: hpc\n")
    assert run in laptop.ok("status", run, "--runs", "elsewhere")


def test_a_profile_without_a_login_node_is_refused_where_it_was_asked_for(laptop: Laptop) -> None:
    laptop.configure("  lab: {launcher: slurm}\n")
    done = laptop.clusterddp("status", "--profile", "lab")
    assert done.returncode == 2
    assert "profile lab names no login node" in done.stderr


def test_init_writes_here_what_the_cluster_says(laptop: Laptop) -> None:
    laptop.ok("init", "--launcher", "slurm", "--profile", "hpc", "new.yaml")
    assert "partition: low" in (laptop.path / "new.yaml").read_text()


def test_the_doctor_looks_at_the_login_node(laptop: Laptop) -> None:
    found = json.loads(laptop.ok("doctor", "job.yaml", "--profile", "hpc", "-o", "json"))
    assert {check["host"] for check in found["checks"]} == {"node1"}


def test_what_is_needed_there_is_what_clusterddp_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_hosts = ("cryptography", "paramiko")
    assert list(NEEDS) == [each for each in project["dependencies"] if not each.startswith(for_hosts)]
