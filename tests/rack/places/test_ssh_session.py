"""The session with a host that has only Python: the constant command, the boot, the agent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterddp.places.ssh.session import package
from clusterddp.planning.ssh import constant_command
from tests.support.paths import ROOT
from tests.support.ssh_person import SshPerson
from tests.support.waiting import wait_until
from tests.testbed.rack import Rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]

PYTHON = sys.executable
CONVERSE = """
import json, os, sys
from clusterddp.errors import SshError
from clusterddp.places.ssh.session import Session
from clusterddp.planning.ssh import SshNode
from clusterddp.places.ssh.sessions import open_sessions
accesses = [SshNode(**access) for access in json.loads(sys.argv[1])]
found = {}
sessions = open_sessions(accesses, environ=os.environ)
for host, session in sessions.items():
    if isinstance(session, Session):
        found[host] = session.hello
        for do, facts in json.loads(sys.argv[2]):
            try:
                found[host][do] = session.ask(do, facts).facts
            except SshError as error:
                found[host][do] = error.message
        session.close()
    else:
        found[host] = {"message": session.message, "hint": session.hint}
print(json.dumps(found))
"""


def converse(person: SshPerson, *accesses: dict[str, object], ask: list[tuple[str, dict[str, object]]] = ()) -> dict:
    arguments = (json.dumps(accesses), json.dumps(list(ask)))
    done = person.rack.run(
        "head", [PYTHON, "-c", CONVERSE, *arguments], env=person.variables(), timeout_s=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def root_of(person: SshPerson) -> Path:
    return person.rack.dir / "home" / "root" / ".clusterddp"


def test_a_host_reports_its_facts(person: SshPerson) -> None:
    hello = converse(person, {"host": "node1", "python": PYTHON})["node1"]
    assert (hello["hostname"], hello["uid"], hello["root"]) == ("node1", 0, str(root_of(person)))


def test_the_package_is_sent_once(person: SshPerson) -> None:
    first, second = (converse(person, {"host": "node1", "root": "~/elsewhere"})["node1"] for _ in range(2))
    assert (first["have"], second["have"]) == (False, True)


def test_two_launchers_may_send_the_package_at_once(person: SshPerson) -> None:
    argv = person.rack.argv(
        "head",
        [PYTHON, "-c", CONVERSE, json.dumps([{"host": "node1", "root": "~/at-once"}]), json.dumps([("beat", {})])],
        env=person.variables(),
    )
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [json.loads(each.communicate()[0])["node1"]["beat"].keys() for each in both] == [{"time"}, {"time"}]


def test_the_agent_answers_what_it_does_not_know_with_an_error(person: SshPerson) -> None:
    found = converse(person, {"host": "node1"}, ask=[("no.such", {}), ("beat", {})])["node1"]
    assert found["no.such"] == "node1: ask: no.such: this agent knows no such operation"
    assert list(found["beat"]) == ["time"]


def test_hosts_that_cannot_start_do_not_keep_the_others(person: SshPerson) -> None:
    found = converse(person, {"host": "node1", "venv": "~/no/venv"}, {"host": "node2"})
    assert found["node1"]["message"].endswith("no/venv/bin/python")
    assert found["node2"]["hostname"] == "node2"


@pytest.mark.parametrize(
    ("access", "words"),
    [
        ({"python": "/no/python"}, "there is no /no/python"),
        ({"python": "$(touch /tmp/canary)"}, "there is no $(touch /tmp/canary)"),
        ({"conda": "vision"}, "there is no conda environment vision"),
        ({"modules": ["cuda/12"]}, "module load cuda/12 failed"),
        ({"root": "/proc/nothing"}, "/proc/nothing"),
    ],
)
def test_the_reason_why_a_host_cannot_start_is_reported(
    person: SshPerson, access: dict[str, object], words: str
) -> None:
    assert words in converse(person, {"host": "node1", **access})["node1"]["message"]


def test_what_is_asked_for_is_no_shell_text(person: SshPerson, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for text in (f"$(touch {canary})", f"`touch {canary}`", f"; touch {canary};", f"x' ; touch {canary} ; '"):
        for name in ("python", "venv", "conda", "root"):
            converse(person, {"host": "node1", name: text})
    assert not canary.exists()


def test_a_directory_that_others_may_write_is_refused(person: SshPerson) -> None:
    place = person.rack.dir / "home" / "root" / "open"
    place.mkdir()
    place.chmod(0o777)
    assert (
        "open: every user can write there; chmod go-w"
        in converse(person, {"host": "node1", "root": "~/open"})["node1"]["message"]
    )


def test_what_a_login_shell_prints_is_skipped(person: SshPerson) -> None:
    profile = person.rack.dir / "home" / "root" / ".bashrc"
    profile.write_text("echo Welcome to node1, there is no smoking here\n")
    try:
        assert converse(person, {"host": "node1"})["node1"]["hostname"] == "node1"
    finally:
        profile.unlink()


def test_an_account_without_a_shell_is_reported(person: SshPerson) -> None:
    with person.sshd("node1", "ForceCommand=/usr/sbin/nologin") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        assert "This account is currently not available" in converse(person, {"host": "node1"})["node1"]["message"]


def test_an_environment_is_found_by_its_directory(person: SshPerson, tmp_path: Path) -> None:
    environment = person.rack.dir / "home" / "root" / "my env"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(environment)], check=True)
    for name in ("venv", "conda"):
        hello = converse(person, {"host": "node1", name: "~/my env"})["node1"]
        assert hello["python"] == str(environment / "bin" / "python")


def test_a_conda_environment_is_found_by_its_name(person: SshPerson) -> None:
    base = person.rack.dir / "home" / "root" / "miniforge3"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(base / "envs" / "vision")], check=True)
    hello = converse(person, {"host": "node1", "conda": "vision"})["node1"]
    assert hello["python"] == str(base / "envs" / "vision" / "bin" / "python")


def test_modules_are_loaded_where_there_are_some(person: SshPerson) -> None:
    # No Environment Modules here: a function of that name, where they would put theirs, stands for them.
    init = person.rack.dir / "home" / "root" / "init"
    init.mkdir()
    (init / "sh").write_text('module() { echo "loading $2"; PATH=/opt/$2/bin:$PATH; }\n')
    (person.rack.dir / "home" / "root" / ".bashrc").write_text(f"export MODULESHOME={init.parent}\n")
    try:
        hello = converse(person, {"host": "node1", "modules": ["cuda", "py"]})["node1"]
        assert hello["path"].startswith("/opt/py/bin:/opt/cuda/bin:")
    finally:
        (person.rack.dir / "home" / "root" / ".bashrc").unlink()


def test_an_agent_exits_with_its_connection(hosts: Rack, person: SshPerson) -> None:
    converse(person, {"host": "node1"}, ask=[("beat", {})])
    listing = ["pgrep", "-c", "-f", "sys.stdin.buffer.readline"]
    wait_until(lambda: hosts.run("node1", listing, check=False).stdout.strip() == "0", 10)


def test_an_agent_without_requests_exits(tmp_path: Path) -> None:
    sent = package()
    order = json.dumps({"package": sent.sha256, "root": str(tmp_path / "root"), "patience_s": 1}).encode()
    process = subprocess.Popen(
        ["/bin/sh", "-c", constant_command()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": "/bin"}
    )
    lines = f"{PYTHON}\n\n\n\n{len(sent.boot)}\n".encode()
    process.stdin.write(
        lines + sent.boot + order + b"\n" + json.dumps({"size": len(sent.data)}).encode() + b"\n" + sent.data
    )
    process.stdin.flush()
    assert process.wait(30) == -14  # SIGALRM


def test_an_agent_that_had_no_time_to_listen_stays(tmp_path: Path) -> None:
    serve = "import sys; from clusterddp.places.ssh.agent.main import serve; serve(*sys.argv[1:], patience_s=3)"
    argv = [PYTHON, "-c", serve, str(tmp_path), str(ROOT)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    for stands_still in (False, True):
        if stands_still:
            process.send_signal(signal.SIGSTOP)
        process.stdin.write(b'{"do": "beat", "size": 0}\n')
        if stands_still:
            time.sleep(4)
            process.send_signal(signal.SIGCONT)
        assert json.loads(process.stdout.readline())["ok"]
    process.stdin.close()
    assert process.wait(30) == 0


def test_the_constant_command_is_one_line_for_any_shell() -> None:
    command = constant_command()
    assert (command.count("'"), "\n" in command, "!" in command) == (2, False, False)


def test_the_same_sources_give_the_same_package() -> None:
    first = package()
    package.cache_clear()
    assert package().sha256 == first.sha256
