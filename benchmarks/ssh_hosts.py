"""Many hosts at once: clusterddp against ssh in a loop, `xargs -P64 ssh`, pdsh, clush and parallel-ssh.

    python benchmarks/ssh_hosts.py [HOSTS [ROUNDS]] [--run] [--peer PYTHON] [--json FILE]    (root: it starts a rack)

The hosts are addresses of 127.0.0.0/8 in a network namespace of their own, behind one sshd that takes as many
connections at once as separate machines would. They have one kernel, so the wall clock of 64 of them on a few cores
measures sshd: `cpu` is what the launching side alone spent (itself and its children, ssh-agent none).

    connect   connect to every host, check its key, run `true` there, leave
    agents    clusterddp: start its agent on every host, which every command for a run does; the others: start Python
    start     (--run) start a process on every host that outlives the connection. clusterddp: a real `submit`, so a
              supervisor, a guard and a rank on each host, three Pythons and the agent; the others: one `sleep`
    cancel    (--run) end it again. clusterddp: `cancel`, which is over when every supervisor has ended its rank and
              said so; the others: `kill`

`--peer` is the Python of an environment of its own with `pip install parallel-ssh clustershell`; pdsh is compared where
the system has it. parallel-ssh checks no host keys and reads no ssh_config; clush and pdsh start an ssh for each host.
Ways are run in turns; figures are medians, and medians of each round's ratio, clusterddp's to theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.ssh_person import SshPerson
from tests.support.ssh_place import SshPlace
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import running_rack

CONNECT = """
import json, os, resource, sys, threading
from clusterddp.errors import SshError
from clusterddp.places.ssh.connections import Connector, call_each
from clusterddp.places.ssh.transport import execute
hosts = sys.argv[1].split(",")
with Connector(os.environ) as connector:
    made = call_each(connector.connect, hosts)
assert not [error for error in made.values() if isinstance(error, SshError)], made

def run(host):
    return execute(made[host].transport, made[host].destination, "true").recv_exit_status()

assert set(call_each(run, hosts).values()) == {0}
threads = threading.active_count()
for session in made.values():
    session.close()
print(json.dumps({"threads": threads, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
"""
AGENTS = """
import json, os, resource, sys, threading
from clusterddp.places.ssh.session import Session
from clusterddp.planning.ssh import SshNode
from clusterddp.places.ssh.sessions import open_sessions
accesses = [SshNode(host=host, python=sys.executable) for host in sys.argv[1].split(",")]
made = open_sessions(accesses, environ=os.environ)
assert all(isinstance(session, Session) for session in made.values()), made
threads = threading.active_count()
for session in made.values():
    session.close()
print(json.dumps({"threads": threads, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
"""
PARALLEL_SSH = """
import json, os, resource, sys
from pssh.clients import ParallelSSHClient
hosts, port, key, command = sys.argv[1:]
client = ParallelSSHClient(hosts.split(","), port=int(port), user="root", pkey=key, pool_size=64, allow_agent=False)
answers = client.run_command(command)
client.join(answers)
assert {answer.exit_code for answer in answers} == {0}
print(json.dumps({"threads": 1, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
"""
MAX_LOOP = 64
"""More hosts are not gone through one after the other: it shows nothing new, and takes minutes."""
SPEC = """\
name: many
launcher: ssh
device: cpu
resources: {{procs_per_node: 1}}
entry: {{script: wait.py}}
ssh:
  python: {python}
  hosts: [{hosts}]
"""
OWN_HOME = 'set -- $SSH_CONNECTION; export HOME=$HOME/hosts/$3; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
"""Gives each host a home of its own, by the address at which it was reached."""


@dataclass(kw_only=True)
class Row:
    """One measurement."""

    wall_s: float
    cpu_s: float
    threads: int = 0
    peak_mb: int = 0


@dataclass(kw_only=True)
class Table:
    """What was measured: stage -> way -> a row per round."""

    rows: dict[str, dict[str, list[Row]]] = field(default_factory=dict)

    def add(self, stage: str, way: str, row: Row) -> None:
        self.rows.setdefault(stage, {}).setdefault(way, []).append(row)
        print(f"  {stage:8} {way:12} {row.wall_s:7.2f} s  cpu {row.cpu_s:6.2f} s", file=sys.stderr, flush=True)

    def lines(self) -> Iterator[str]:
        yield f"{'':8} {'':12} {'wall':>8} {'cpu':>8} {'threads':>8} {'peak':>7}  {'clusterddp to it: wall':25} cpu"
        for stage, ways in self.rows.items():
            ours = ways["clusterddp"]
            for way, rows in ways.items():
                wall_s, cpu_s = (statistics.median(getattr(row, name) for row in rows) for name in ("wall_s", "cpu_s"))
                shown = "".join(f"{spell_ratio(ours, rows, name):26}" for name in ("wall_s", "cpu_s"))
                self_told = f"{rows[0].threads:8} {rows[0].peak_mb:4} MB" if rows[0].threads else " " * 16
                figures = f"{wall_s:6.2f} s {cpu_s:6.2f} s {self_told}"
                yield f"{stage:8} {way:12} {figures}  {shown if rows is not ours else ''}"


def spell_ratio(ours: list[Row], theirs: list[Row], name: str) -> str:
    ratios = [getattr(row, name) / getattr(other, name) for row, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@dataclass(kw_only=True)
class Bench:
    """Hosts and the ways to speak to them."""

    person: SshPerson
    place: SshPlace
    hosts: list[str]
    port: int
    peer: str | None

    def measure(self, argv: list[str], stdin: str = "") -> Row:
        """Run a command on the head; its time, and what the processor did for it there."""
        before, start = os.times(), time.monotonic()
        variables = self.person.variables() | {"PYTHONDONTWRITEBYTECODE": ""}
        done = self.person.rack.run(HEAD, argv, env=variables, cwd=self.place.path, timeout_s=900, stdin=stdin)
        wall_s, after = time.monotonic() - start, os.times()
        facts = json.loads(done.stdout.splitlines()[-1]) if '"threads"' in done.stdout else {}
        cpu_s = sum(after[2:4]) - sum(before[2:4])
        return Row(wall_s=wall_s, cpu_s=cpu_s, **facts)

    def others(self, command: str) -> dict[str, Callable[[], Row]]:
        """List the ways to run a command on all hosts."""
        lines = "".join(f"{host}\n" for host in self.hosts)
        quoted = shlex.quote(command)
        ways: dict[str, Callable[[], Row]] = {
            "ssh, a loop": lambda: self.measure(["sh", "-c", f"while read -r h; do ssh -n $h {quoted}; done"], lines),
            "xargs -P64": lambda: self.measure(["xargs", "-P64", "-I@", "ssh", "-n", "@", command], lines),
        }
        if len(self.hosts) > MAX_LOOP:
            del ways["ssh, a loop"]
        peer = self.peer
        if peer is not None:
            words = [",".join(self.hosts), str(self.port), str(self.person.ssh / "id_ed25519"), command]
            ways["parallel-ssh"] = lambda: self.measure([peer, "-c", PARALLEL_SSH, *words])
            clush = [str(Path(peer).with_name("clush")), "-S", "-f", "64", "-w", ",".join(self.hosts), command]
            ways["clush"] = lambda: self.measure(clush)
        if shutil.which("pdsh"):
            ways["pdsh"] = lambda: self.measure(
                ["pdsh", "-R", "ssh", "-S", "-f64", "-w", ",".join(self.hosts), command]
            )
        return ways

    def program(self, text: str) -> Row:
        return self.measure([sys.executable, "-c", text, ",".join(self.hosts)])

    def submit(self) -> Row:
        return self.measure(self.place.command("submit", "job.yaml"))

    def cancel(self) -> Row:
        run = self.place.run_dir()
        row = self.measure(self.place.command("cancel", run.name))
        self.place.await_gone()
        return row


def main() -> None:
    arguments = parse()
    table = Table()
    with many_hosts(arguments.hosts, arguments.peer) as bench:
        for number in range(arguments.rounds + 1):  # the first round warms up: our package on the host, caches
            compare(bench, table if number else Table(), number, with_run=arguments.run)
        print(f"{arguments.hosts} hosts, {arguments.rounds} rounds")
        print("\n".join(table.lines()))
        if arguments.json:
            rows = {
                stage: {way: [asdict(row) for row in rows] for way, rows in ways.items()}
                for stage, ways in table.rows.items()
            }
            arguments.json.write_text(json.dumps({"hosts": arguments.hosts, "rows": rows}, indent=1))


def compare(bench: Bench, table: Table, number: int, *, with_run: bool) -> None:
    """Measure each stage in each way once, in an order that changes from round to round."""
    nothing = bench.others("true")
    python = bench.others(f"{sys.executable} -I -S -c pass")
    start = bench.others("setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! >~/many.pid")
    end = bench.others("kill $(cat ~/many.pid)")
    ours: dict[str, Callable[[], Row]] = {
        "connect": lambda: bench.program(CONNECT),
        "agents": lambda: bench.program(AGENTS),
        "start": bench.submit,
        "cancel": bench.cancel,
    }
    stages = {"connect": nothing, "agents": python} | ({"start": start, "cancel": end} if with_run else {})
    ways = ["clusterddp", *(nothing if number else ())]
    for way in ways if number % 2 else reversed(ways):
        for stage, others in stages.items():
            table.add(stage, way, ours[stage]() if way == "clusterddp" else others[way]())


@contextmanager
def many_hosts(count: int, peer: str | None) -> Iterator[Bench]:
    """Have a rack whose head is also all the hosts."""
    hosts = [f"127.0.{1 + number // 250}.{1 + number % 250}" for number in range(count)]
    with running_rack(RackPlan(nodes=[], slurm=False, gpus_per_host=0)) as rack:
        person = SshPerson(rack=rack, path=rack.home(HEAD), checks=False, ports=iter([22]))
        rack.run(HEAD, ["pkill", "-x", "sshd"])
        path = rack.dir / "home" / "root" / "place"
        path.mkdir()
        (path / "wait.py").write_text("import time\n\ntime.sleep(600)\n")
        (path / "job.yaml").write_text(SPEC.format(python=sys.executable, hosts=", ".join(hosts)))
        for host in hosts:
            (rack.home(HEAD) / "hosts" / host).mkdir(parents=True)
        with person.sshd(HEAD, "MaxStartups=4096", "LogLevel=ERROR", f"ForceCommand={OWN_HOME}") as sshd:
            person.configure("StrictHostKeyChecking yes\nBatchMode yes\n")
            person.known_hosts.write_text(f"127.0.* {person.host_key(HEAD)}\n")
            place = SshPlace(rack=rack, path=path)
            yield Bench(person=person, place=place, hosts=hosts, port=sshd.port, peer=peer)
        shutil.rmtree(rack.home(HEAD) / "hosts")  # a package on each: more than the rack's end has time for


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts", type=int, nargs="?", default=64)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--peer")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
