"""Connecting to hosts as the user's own ssh would: ssh_config, keys, jump hosts, hosts that do not answer."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.ssh_person import listening, make_key

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


def test_a_plain_host_answers(person):
    answer = person.check("node1")
    assert answer.exit_code == 0
    assert answer.hosts["node1"]["fingerprint"] == person.fingerprint("node1")


def test_a_host_list_is_expanded_in_order(person):
    assert list(person.check("node[3,1-2]").hosts) == ["node3", "node1", "node2"]


def test_an_alias_of_ssh_config_is_followed(person):
    person.configure("Host gpu\n  HostName node2\n")
    assert person.check("gpu").hosts["gpu"]["hostname"] == "node2"


def test_include_and_match_are_followed(person):
    person.configure("Include more\nMatch originalhost gpu exec true\n  HostName node3\n")
    person.configure("Host gpu\n  User ana\n", "more")
    row = person.check("gpu").hosts["gpu"]
    assert (row["hostname"], row["user"]) == ("node3", "ana")


def test_port_and_user_of_ssh_config_are_taken(person):
    with person.sshd("node1") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n  User ana\n")
        row = person.check("node1").hosts["node1"]
        assert "userauth-request for user ana" in sshd.log.read_text()
    assert (row["ok"], row["port"], row["user"]) == (True, sshd.port, "ana")


def test_the_identity_file_of_ssh_config_is_offered(person):
    (person.ssh / "id_ed25519").rename(person.ssh / "key of mine")
    person.configure('Host node1\n  IdentityFile "~/.ssh/key of mine"\n')
    assert person.check("node1", "node2").exit_code == 3
    assert person.check("node1").exit_code == 0


def test_a_key_of_the_agent_is_offered(person, tmp_path):
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            agent.poll()
        environ = {"SSH_AUTH_SOCK": str(socket), "PATH": "/usr/bin:/bin"}
        subprocess.run(["ssh-add", str(person.ssh / "id_ed25519")], env=environ, check=True, capture_output=True)
        (person.ssh / "id_ed25519").unlink()
        person.environ["SSH_AUTH_SOCK"] = str(socket)
        assert person.check("node1").exit_code == 0
    finally:
        agent.kill()
        agent.wait()


def test_a_key_with_a_passphrase_is_named_with_its_remedy(person):
    run = ["ssh-keygen", "-p", "-q", "-P", "", "-N", "secret", "-f", str(person.ssh / "id_ed25519")]
    subprocess.run(run, check=True, capture_output=True)
    row = person.check("node1").hosts["node1"]
    assert (row["phase"], row["fix"]) == ("authentication", f"ssh-add {person.ssh}/id_ed25519")


def test_a_host_behind_two_others_is_reached(person):
    person.configure("Host far\n  HostName node3\n  ProxyJump node1,node2\n")
    with person.sshd("node3") as sshd:
        person.configure(f"Host far\n  HostName node3\n  Port {sshd.port}\n  ProxyJump node1,node2\n")
        row = person.check("far").hosts["far"]
        log = sshd.log.read_text()
    assert row["jumps"] == ["node1", "node2"]
    assert f"Connection from {person.rack.plan.address('node2')} " in log


def test_a_jump_host_has_its_own_jump_host(person):
    person.configure("Host far\n  HostName node3\n  ProxyJump node2\nHost node2\n  ProxyJump node1\n")
    row = person.check("far").hosts["far"]
    assert (row["ok"], row["jumps"]) == (True, ["node1", "node2"])


def test_a_jump_host_whose_key_is_not_known_is_named(person):
    lines = person.known_hosts.read_text().splitlines(keepends=True)
    person.known_hosts.write_text("".join(line for line in lines if not line.startswith("node1,")))
    person.configure("Host far\n  HostName node3\n  ProxyJump node1\n")
    row = person.check("far").hosts["far"]
    assert row["phase"] == "host key"
    assert row["found"].startswith("on the way, node1: node1 is not known")
    assert row["fix"].endswith("asks, and keeps the key: ssh node1")


def test_a_jump_host_that_does_not_forward_is_named(person):
    with person.sshd("node1", "AllowTcpForwarding=no") as sshd:
        person.configure(
            f"Host far\n  HostName node2\n  ProxyJump way\nHost way\n  HostName node1\n  Port {sshd.port}\n"
        )
        row = person.check("far").hosts["far"]
    assert row["found"] == "way does not forward connections to node2:22"


def test_a_host_behind_a_jump_host_that_is_off_is_reported(person):
    person.configure("Host far\n  HostName 10.77.0.99\n  ProxyJump node1\n")
    assert person.check("far").hosts["far"]["found"].startswith("node1 cannot connect to 10.77.0.99:22")


def test_a_host_that_also_requires_a_password_is_reported(person):
    with person.sshd("node1", "AuthenticationMethods=publickey,password", "PasswordAuthentication=yes") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        row = person.check("node1").hosts["node1"]
    assert row["found"] == "the host accepts root with a key and password only"


def test_a_host_that_opens_no_session_is_reported_in_plain_words(person):
    with person.sshd("node1", "MaxSessions=0") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        row = person.check("node1").hosts["node1"]
        assert (row["phase"], row["found"]) == ("connect", f"node1:{sshd.port} opens no session (Connect failed)")
        assert "MaxSessions" in row["fix"]


def test_a_circle_of_jumps_is_reported(person):
    person.configure("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    assert person.check("a").hosts["a"]["phase"] == "resolve"


def test_a_proxy_command_is_run_by_a_shell(person):
    person.configure("Host far\n  HostName node3\n  ProxyCommand ssh -W %h:%p node1 2>/dev/null\n")
    assert person.check("far").exit_code == 0


def test_the_error_of_a_proxy_command_is_reported(person):
    person.configure("Host far\n  HostName node3\n  ProxyCommand echo no way >&2\n")
    assert "no way" in person.check("far").hosts["far"]["found"]


def test_a_host_that_is_off_does_not_keep_others_from_being_reached(person):
    person.configure("Host off\n  HostName 10.77.0.99\n  ConnectTimeout 1\n")
    answer = person.check("off", "node1")
    assert (answer.exit_code, answer.hosts["off"]["phase"], answer.hosts["node1"]["ok"]) == (3, "connect", True)


def test_a_name_that_does_not_resolve_is_reported(person):
    person.configure("Host nowhere\n  HostName no.such.host\n")
    assert person.check("nowhere").hosts["nowhere"]["phase"] == "resolve"


def test_a_port_where_nothing_listens_is_reported(person):
    person.configure("Host node1\n  Port 9\n")
    assert person.check("node1").hosts["node1"]["found"] == "node1:9 refused the connection"


def test_a_host_that_accepts_and_sends_nothing_is_reported(person):
    with listening(person.rack, "node1", 9022):
        person.configure("Host node1\n  Port 9022\n  ConnectTimeout 1\n")
        row = person.check("node1").hosts["node1"]
    assert row["found"] == "node1:9022 accepted the connection, then nothing for 1 s"


def test_twenty_connections_get_through_a_sshd_that_takes_two_at_a_time(person):
    with person.sshd("node1", "MaxStartups=2") as sshd:
        person.configure(f"Host n*\n  HostName node1\n  Port {sshd.port}\n")
        answer = person.check("n[1-20]")
        log = sshd.log.read_text()
    assert [row["host"] for row in answer.hosts.values() if not row["ok"]] == []
    assert "MaxStartups" in log


def test_a_banner_does_no_harm(person, tmp_path):
    banner = tmp_path / "banner"
    banner.write_text("Authorised use only.\n" * 50)
    with person.sshd("node1", f"Banner={banner}") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        assert person.check("node1").exit_code == 0


def test_a_host_that_refuses_the_keys_is_reported_with_the_keys(person):
    (person.ssh / "id_ed25519").unlink()
    make_key(person.ssh / "id_ed25519")
    row = person.check("node1").hosts["node1"]
    assert row["phase"] == "authentication"
    assert row["found"] == f"root@node1: refused {person.ssh}/id_ed25519"
    assert row["fix"].startswith("ssh-copy-id node1")


def test_below_a_table_is_the_command_that_repairs_a_host(person):
    person.configure("Host node1\n  Port 9\n")
    done = person.clusterddp("hosts", "check", "node[1-2]")
    heading, good, bad, fix = done.stdout.splitlines()
    assert heading.split() == ["HOST", "ADDRESS", "USER", "VIA", "KEY", "ROUND", "TRIP"]
    assert good.split()[:5] == ["node2", "node2:22", "root", "-", "ssh-ed25519"]
    assert bad == "node1  failed  connect: node1:9 refused the connection"
    assert fix.startswith("      fix: ")


def test_many_hosts_share_one_connection_to_the_jump_host(person):
    with person.sshd("node1") as sshd:
        person.configure(
            f"Host f*\n  HostName node2\n  ProxyJump way\nHost way\n  HostName node1\n  Port {sshd.port}\n"
        )
        answer = person.check("f[1-12]")
        log = sshd.log.read_text()
    assert answer.exit_code == 0
    assert log.count("Accepted publickey") == 1


def test_no_thread_is_left_when_connections_are_closed(person):
    person.configure("Host far\n  HostName node3\n  ProxyJump node1\n")
    program = """
import os, threading
from clusterddp.places.ssh.connections import Connector, call_each
with Connector(os.environ) as connector:
    made = call_each(connector.connect, ["node1", "far"])
for session in made.values():
    session.close()
for thread in threading.enumerate()[1:]:
    thread.join(10)
print(threading.active_count())
"""
    assert person.python(program) == "1\n"


def test_names_of_ssh_config_are_completed(person):
    person.configure("Include more\nHost gpu01 gpu* web\n")
    person.configure("Host gpu02\n", "more")
    person.environ.update(_CLUSTERDDP_COMPLETE="bash_complete", COMP_WORDS="clusterddp hosts check gpu", COMP_CWORD="3")
    assert person.clusterddp().stdout.split() == ["plain,gpu02", "plain,gpu01"]
