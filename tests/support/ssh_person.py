"""A person on the head of a rack who reaches the nodes by SSH: for tests of the connections."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.person import Person
from tests.support.waiting import wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack


@dataclass(frozen=True)
class Answer:
    exit_code: int
    hosts: dict[str, dict[str, Any]]
    said: str


@dataclass(kw_only=True)
class SshPerson(Person):
    """root on the head, at home, whose ~/.ssh every test may change."""

    rack: Rack
    ports: Iterator[int] = field(default_factory=lambda: iter(range(2200, 2300)))

    @property
    def ssh(self) -> Path:
        return self.rack.dir / "home" / "root" / ".ssh"

    @property
    def known_hosts(self) -> Path:
        return self.ssh / "known_hosts"

    def configure(self, text: str, name: str = "config") -> None:
        (self.ssh / name).write_text(text)

    def host_key(self, node: str) -> str:
        """Return `ssh-ed25519 AAAA...` of a node."""
        words = (self.rack.dir / "etc" / f"hostkey.{node}.pub").read_text().split()
        return " ".join(words[:2])

    def fingerprint(self, node: str) -> str:
        return fingerprint_of(self.rack.dir / "etc" / f"hostkey.{node}.pub")

    def variables(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {"TERM": "dumb", **super().variables(more)}

    def argv(self, *arguments: str) -> list[str]:
        return self.rack.argv(HEAD, self.command(*arguments), env=self.variables())

    def check(self, *hosts: str) -> Answer:
        done = self.clusterddp("hosts", "check", "-o", "json", *hosts)
        assert done.stdout, done.stderr
        return Answer(done.returncode, {row["host"]: row for row in json.loads(done.stdout)["hosts"]}, done.stderr)

    def python(self, program: str) -> str:
        """Run a program against clusterddp's own functions."""
        return self.rack.run(HEAD, [sys.executable, "-c", program], env=self.variables(), timeout_s=150).stdout

    @contextmanager
    def sshd(self, node: str, *options: str, host_key: Path | None = None) -> Iterator[Sshd]:
        """Run another sshd on a node, on a port of its own."""
        port = next(self.ports)
        base = self.rack.dir / "shared" / f"sshd-{port}"
        key = host_key or self.rack.dir / "etc" / f"hostkey.{node}"
        Path(f"{base}.log").unlink(missing_ok=True)
        config = self.rack.dir / "etc" / "sshd_config"
        settings = [f"Port={port}", "LogLevel=DEBUG1", f"PidFile={base}.pid", *options]
        argv = ["/usr/sbin/sshd", "-f", str(config), "-h", str(key), "-E", f"{base}.log"]
        self.rack.run(node, [*argv, *(word for setting in settings for word in ("-o", setting))])
        pid_file = Path(f"{base}.pid")
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), 10)
        try:
            yield Sshd(port=port, log=Path(f"{base}.log"))
        finally:
            self.rack.run(node, ["kill", pid_file.read_text().strip()])


@dataclass(frozen=True, kw_only=True)
class Sshd:
    port: int
    log: Path


@contextmanager
def listening(rack: Rack, node: str, port: int) -> Iterator[None]:
    """Accept connections on a node, and say nothing."""
    program = f"import socket, sys; s = socket.create_server(('', {port})); print('up', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        rack.argv(node, [sys.executable, "-c", program]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def own_ssh_dir(rack: Rack) -> Iterator[SshPerson]:
    """Give a person whose ~/.ssh is put back in order at the end."""
    person = SshPerson(rack=rack, path=rack.home(HEAD), checks=False)
    kept = rack.dir / "ssh-kept"
    shutil.copytree(person.ssh, kept, copy_function=shutil.copy2)
    try:
        yield person
    finally:
        shutil.rmtree(person.ssh)
        kept.rename(person.ssh)


def make_key(path: Path, *options: str) -> str:
    """Make a key pair; return its public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", *options, "-f", str(path)], check=True)
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


def fingerprint_of(public_key: Path) -> str:
    return subprocess.check_output(["ssh-keygen", "-lf", str(public_key)], text=True).split()[1]
