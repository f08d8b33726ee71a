"""Host keys as OpenSSH checks them: no key is accepted unseen, and no known key is lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.ssh_person import SshPerson, fingerprint_of, make_key

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]


def certified_key(tmp_path: Path, *options: str) -> tuple[Path, Path]:
    """Make a host key with a certificate, and the authority that signs it."""
    key, authority = tmp_path / "hostkey", tmp_path / "authority"
    make_key(key)
    make_key(authority)
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "host", "-h", *options, f"{key}.pub"]
    subprocess.run(sign, check=True, capture_output=True)
    return key, authority


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def check_certified(person: SshPerson, key: Path, known: str) -> dict[str, object]:
    """Check a host that shows a certificate, with this as the only line of known_hosts."""
    with person.sshd("node1", f"HostCertificate={key}-cert.pub", host_key=key) as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        person.known_hosts.write_text(known)
        return person.check("node1").hosts["node1"]


def pinned(person: SshPerson, host_key: str) -> str:
    """Connect to node1 with a pinned key; return what becomes of it."""
    program = f"""
import os
from clusterddp.errors import SshError
from clusterddp.places.ssh.connections import Connector
try:
    Connector(os.environ).connect("node1", pinned={host_key!r}).close()
    print("connected")
except SshError as error:
    print(error.message)
"""
    return person.python(program).strip()


def test_a_host_that_is_not_known_is_shown_with_its_fingerprint(person):
    person.known_hosts.unlink()
    row = person.check("node1").hosts["node1"]
    assert row["phase"] == "host key"
    assert row["found"] == f"node1 is not known; it shows ssh-ed25519 {person.fingerprint('node1')}"
    assert row["fix"].endswith("asks, and keeps the key: ssh node1")


@pytest.mark.parametrize("known", ["", "[node1]:{port} {other}\n", "@revoked [node1]:{port} {own}\n"])
def test_a_host_whose_key_is_wrong_is_asked_for_no_authentication(person, known):
    with person.sshd("node1") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        own, other = person.host_key("node1"), person.host_key("node2")
        person.known_hosts.write_text(known.format(port=sshd.port, own=own, other=other))
        assert person.check("node1").exit_code == 3
        log = sshd.log.read_text()
    assert "SSH2_MSG_NEWKEYS received" in log
    assert "userauth" not in log


@pytest.mark.parametrize("setting", ["no", "accept-new"])
def test_no_setting_adds_a_key_without_a_question(person, setting):
    person.known_hosts.unlink()
    person.configure(f"StrictHostKeyChecking {setting}\n")
    assert person.check("node1").exit_code == 3
    assert not person.known_hosts.exists()


def test_a_changed_key_is_reported_with_both_fingerprints(person):
    person.known_hosts.write_text(f"# mine\nnode1 {person.host_key('node2')}\n")
    row = person.check("node1").hosts["node1"]
    assert row["found"] == (
        f"HAS CHANGED: node1 shows ssh-ed25519 {person.fingerprint('node1')}, "
        f"known is ssh-ed25519 {person.fingerprint('node2')} ({person.known_hosts}:2)"
    )


def test_a_revoked_key_is_refused_although_it_is_known(person):
    key = person.host_key("node1")
    person.known_hosts.write_text(f"node1 {key}\n@revoked * {key}\n")
    row = person.check("node1").hosts["node1"]
    assert row["found"] == f"the key {person.fingerprint('node1')} is revoked ({person.known_hosts}:2)"


def test_a_key_in_a_revocation_list_is_refused(person, tmp_path):
    person.configure(f"RevokedHostKeys {tmp_path}/list\n")
    own = person.rack.dir / "etc" / "hostkey.node1.pub"
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(tmp_path / "list"), str(own)], check=True)
    answer = person.check("node[1-2]")
    assert {host: row["ok"] for host, row in answer.hosts.items()} == {"node1": False, "node2": True}


def test_hashed_names_are_found(person):
    person.known_hosts.write_text(f"node1 {person.host_key('node1')}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(person.known_hosts)], check=True, capture_output=True)
    assert "node1" not in person.known_hosts.read_text()
    assert person.check("node1").exit_code == 0


def test_patterns_are_matched(person):
    person.known_hosts.write_text(f"*,!node2 {person.host_key('node1')}\n")
    answer = person.check("node[1-2]")
    assert answer.hosts["node1"]["ok"]
    assert answer.hosts["node2"]["found"].startswith("node2 is not known")


def test_a_port_of_its_own_has_a_key_of_its_own(person, tmp_path):
    key = tmp_path / "hostkey"
    make_key(key)
    with person.sshd("node1", host_key=key) as sshd:
        person.configure(f"Host other\n  HostName node1\n  Port {sshd.port}\n")
        with person.known_hosts.open("a") as known_hosts:
            known_hosts.write(f"[node1]:{sshd.port} {public(key)}\n")
        assert person.check("other", "node1").exit_code == 0


def test_the_alias_of_a_host_key_is_looked_up(person):
    person.known_hosts.write_text(f"rack-one {person.host_key('node1')}\n")
    person.configure("Host node1\n  HostKeyAlias rack-one\n")
    assert person.check("node1").exit_code == 0


def test_the_known_hosts_of_the_machine_count(person, tmp_path):
    person.known_hosts.rename(tmp_path / "of_the_machine")
    person.configure(f"GlobalKnownHostsFile {tmp_path}/of_the_machine\n")
    assert person.check("node1").exit_code == 0


def test_the_kind_of_key_that_is_known_is_asked_for(person, tmp_path):
    rsa = tmp_path / "rsa"
    make_key(rsa, "-t", "rsa")
    with person.sshd("node1", f"HostKey={rsa}") as sshd:
        person.configure(f"Host node1\n  Port {sshd.port}\n")
        person.known_hosts.write_text(f"[node1]:{sshd.port} {public(rsa)}\n")
        row = person.check("node1").hosts["node1"]
    assert (row["ok"], row["key_type"]) == (True, "ssh-rsa")


def test_a_host_with_a_certificate_of_a_known_authority_is_accepted(person, tmp_path):
    key, authority = certified_key(tmp_path, "-n", "node1")
    row = check_certified(person, key, f"@cert-authority node* {public(authority)}\n")
    assert (row["ok"], row["fingerprint"]) == (True, fingerprint_of(Path(f"{key}.pub")))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["-n", "node2"], "its certificate is for node2, not for node1"),
        (["-n", "node1", "-V", "20200101:20210101"], "its certificate has expired at"),
        (["-n", "node1", "-V", "20990101:20990201"], "its certificate is not valid before"),
    ],
)
def test_a_certificate_that_is_not_valid_is_refused(person, tmp_path, options, found):
    key, authority = certified_key(tmp_path, *options)
    row = check_certified(person, key, f"@cert-authority node* {public(authority)}\n")
    assert row["found"].startswith(found)


def test_a_certificate_of_an_unknown_authority_does_not_count(person, tmp_path):
    key, _ = certified_key(tmp_path, "-n", "node1")
    row = check_certified(person, key, f"@cert-authority node* {person.host_key('node2')}\n")
    assert "and no certificate of the authority that known_hosts names" in row["found"]


def test_a_certificate_of_a_revoked_authority_is_refused(person, tmp_path):
    key, authority = certified_key(tmp_path, "-n", "node1")
    known = f"@cert-authority node* {public(authority)}\n@revoked * {public(authority)}\n"
    assert "is revoked" in check_certified(person, key, known)["found"]


def test_a_pinned_key_needs_no_known_hosts(person):
    person.known_hosts.unlink()
    assert pinned(person, person.fingerprint("node1")) == "connected"
    assert pinned(person, person.host_key("node1")) == "connected"


def test_another_key_than_the_pinned_one_is_refused_although_it_is_known(person):
    assert pinned(person, person.fingerprint("node2")) == (
        f"node1: host key: the host shows ssh-ed25519 {person.fingerprint('node1')}, "
        f"the pinned host_key is {person.fingerprint('node2')}"
    )
