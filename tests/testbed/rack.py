"""The rack: starts its hosts, runs commands on them, fails them, and takes everything down again."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import PATIENCE, NotInTimeError, wait_until
from tests.testbed.confinement import CGROUPS, UNSHARE, plan_namespaces
from tests.testbed.files import FREEZER, write_rack_files
from tests.testbed.plan import HEAD, SYSTEM_PATH, RackPlan
from tests.testbed.private import HOMES, outside

HERE = Path(__file__).parent
TOOLS = (
    *("slurmctld", "slurmd", "srun", "munged"),
    *("sshd", "ssh", "ssh-keygen"),
    "ip",
    "tc",
    "nft",
    "nsenter",
    "setpriv",
    "pkill",
    "strace",
)
ACCOUNTING_TOOLS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")

KEEPER = f"""\
dir=$1
shift
rack=${{dir##*/}}
if read -r go; then
    setpriv --pdeathsig KILL "$@" &
    read -r eof
    pkill -KILL -P $! || kill -KILL $!
    find {FREEZER}/$rack -name freezer.state -exec sh -c 'echo THAWED >"$0"' {{}} \\; 2>/dev/null
    wait $!
fi
for again in 0 0.1 1; do # its last processes may still be on their way out
    sleep $again
    find {CGROUPS}/*/"$rack" -depth -type d -exec rmdir {{}} \\; 2>/dev/null || break
done
rm -rf "$dir"
"""
"""Stays outside of the namespaces and starts the head on request. When the pipe that the owner holds is closed,
it kills the head's init, with which the kernel ends every process of the rack (one of a suspended job must run for it),
and clears away the directory and the cgroups."""


class RackError(Exception):
    """The rack or one of its commands did not do what it was asked to."""


def find_obstacle(*, accounting: bool = False) -> str:
    """Say why no rack, or none with accounting, can run here; or nothing."""
    if os.geteuid() != 0:
        return "the test cluster needs root"
    missing = [tool for tool in TOOLS + ACCOUNTING_TOOLS * accounting if shutil.which(tool, path=SYSTEM_PATH) is None]
    if missing:
        return f"the test cluster needs {', '.join(missing)}; hint: tests/testbed/install"
    probe = subprocess.run([*UNSHARE, "true"], check=False, capture_output=True, text=True)
    return f"the test cluster needs namespaces: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass(kw_only=True)
class Rack:
    """A running rack; made by `running_rack`."""

    plan: RackPlan
    dir: Path
    """All state of the rack; `dir/shared` is storage that every host and the owner see and any user may write."""
    keeper: subprocess.Popen[bytes]
    powered: dict[str, int] = field(default_factory=dict)
    """Host -> pidfd of its init."""
    inits: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Node -> the process that ends with the node."""

    def argv(
        self,
        host: str,
        command: Sequence[str],
        *,
        user: str = "root",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Plan the command that runs `command` on a host in a fresh environment, as if `user` had just logged in."""
        home = self.home(host, user)
        variables = {"PATH": self.plan.path(host), "HOME": str(home), "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
        entries = [f"{name}={value}" for name, value in {**variables, **(env or {})}.items()]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user != "root" else []
        return [*self._enter(host), *become, "env", "-i", f"--chdir={cwd or home}", *entries, *command]

    def home(self, host: str, user: str = "root") -> Path:
        """Name the home of a user as a host sees it."""
        private = host != HEAD and self.plan.private_hosts
        return HOMES[user] if private else self.dir / "home" / user

    def outside(self, node: str, path: str | Path) -> Path:
        """Return where a file of a private host lies on this machine; it is there when the host is off, too."""
        return outside(self.plan, self.dir, node, Path(path))

    def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        user: str = "root",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = True,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end.

        Raises: RackError when it fails and `check` is set; subprocess.TimeoutExpired.
        """
        argv = self.argv(host, command, user=user, cwd=cwd, env=env)
        done = subprocess.run(
            argv, check=False, capture_output=True, text=True, timeout=PATIENCE * timeout_s, input=stdin
        )
        if check and done.returncode:
            raise RackError(f"{host}: {command} left with {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def pids(self, host: str) -> list[int]:
        """List the processes on a host, by their numbers on this machine."""
        own = (self._init(host) / "ns/pid").readlink()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (process / "ns/pid").readlink() == own:
                    found.append(int(process.name))
        return found

    def pid_on_head(self, node: str) -> int:
        """Return the number that the head knows a node's init by."""
        status = (self._init(node) / "status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-2])

    def power_off(self, node: str) -> None:
        """Let a node lose power: its peers hear nothing more from it, not even that its connections are closed."""
        self.pull_cable(node)
        pidfd = self.powered.pop(node)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._thaw(node)
        select.select([pidfd], [], [])
        os.close(pidfd)
        (self.dir / "pid" / node).unlink()

    def power_on(self, *nodes: str) -> None:
        """Start nodes and wait until their init has started the daemons; Slurm learns of them a little later."""
        for node in nodes:
            init = [str(HERE / "host.sh"), str(self.dir), node, self.plan.address(node), self.plan.port(node)]
            log = self.dir / "log" / f"{node}.init"
            self.inits[node] = start_detached(
                [*self._enter(HEAD), *plan_namespaces(self.plan), *init], log, stdin=subprocess.DEVNULL
            )
        for node in nodes:
            self._await_init(node)

    def pull_cable(self, node: str) -> None:
        """Cut a node from the network; its own interface keeps its address and loses the carrier."""
        self.run(HEAD, ["ip", "link", "set", self.plan.port(node), "down"])

    def plug_cable(self, node: str) -> None:
        """Connect a node to the network again."""
        self.run(HEAD, ["ip", "link", "set", self.plan.port(node), "up"])

    def set_link_rate(self, node: str, mbit_per_s: float | None) -> None:
        """Make a node's cable this slow, in both directions, each on its own; None takes the limit away."""
        for host, device in ((HEAD, self.plan.port(node)), (node, "eth0")):
            self.run(host, ["tc", "qdisc", "delete", "dev", device, "root"], check=False)
            if mbit_per_s is not None:
                burst = max(65_536, int(mbit_per_s * 1e6 / 8 / 250))  # one timer tick's worth, and a whole GSO packet
                limit = ["rate", f"{mbit_per_s}mbit", "burst", str(burst), "latency", "50ms"]
                self.run(host, ["tc", "qdisc", "add", "dev", device, "root", "tbf", *limit])

    def node_state(self, node: str) -> str:
        """Ask Slurm how a node is: idle, mixed, down, ...; `*` says that it does not answer."""
        return self.run(HEAD, ["sinfo", "-h", "-N", "-p", "low", "-n", node, "-o", "%T"]).stdout.strip()

    def await_idle(self, *nodes: str, within_s: float = 60) -> None:
        """Wait until Slurm calls these nodes (all, when none is named) idle."""
        wanted = nodes or self.plan.nodes
        query = ["sinfo", "-h", "-N", "-p", "low", "-n", ",".join(wanted), "-o", "%T"]

        def all_idle() -> bool:
            return self.run(HEAD, query, check=False).stdout.split() == ["idle"] * len(wanted)

        try:
            wait_until(all_idle, within_s)
        except NotInTimeError as error:
            raise RackError(f"nodes did not become idle: {error}\n{self.log_tails()}") from error

    def log_tails(self) -> str:
        """Read the last lines of every daemon's log."""
        logs = sorted((self.dir / "log").iterdir())
        return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)

    def stop(self) -> None:
        """End every process of the rack and remove its directory."""
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        for process in (self.keeper, *self.inits.values()):
            process.wait(timeout=240)
        for pidfd in self.powered.values():
            os.close(pidfd)
        shutil.rmtree(self.dir, ignore_errors=True)

    def tell_keeper_to_go(self) -> None:
        """Start the head."""
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(b"go\n")
        self.keeper.stdin.flush()
        self._await_init(HEAD)

    def _thaw(self, node: str) -> None:
        """Let the processes of a suspended job run: they cannot die before."""
        for state in (FREEZER / self.dir.name / node).rglob("freezer.state"):
            with contextlib.suppress(OSError):  # it has gone with its step
                state.write_text("THAWED")

    def _enter(self, host: str) -> list[str]:
        """Plan the way into a host.

        `ip netns exec` would remount /sys and hide the cgroups from slurmd.
        """
        return ["nsenter", "-t", self._init(host).name, "-n", "-u", "-i", "-m", "-p", "--"]

    def _init(self, host: str) -> Path:
        pid_file = self.dir / "pid" / host
        if not pid_file.exists():
            raise RackError(f"{host} is off")
        return Path("/proc", pid_file.read_text().strip())

    def _await_init(self, host: str) -> None:
        pid_file, failed = self.dir / "pid" / host, self.dir / "pid" / f"{host}.failed"
        wait_until(lambda: pid_file.exists() or failed.exists(), 60)
        if not pid_file.exists():
            raise RackError(f"{host} did not start\n{self.log_tails()}")
        self.powered[host] = os.pidfd_open(int(pid_file.read_text()))


@contextlib.contextmanager
def running_rack(plan: RackPlan | None = None) -> Iterator[Rack]:
    """Start a rack and wait until all its nodes are idle; take it down at the end.

    The rack also ends, and removes its directory, when its owner dies: the keeper reads a pipe that only the owner
    holds. (A child that the owner makes with a bare fork holds it too.)
    """
    plan = plan or RackPlan()
    directory = Path(tempfile.mkdtemp(prefix="rack-", dir="/var/tmp" if plan.confine else None))
    (directory / "log").mkdir()
    init = [str(HERE / "host.sh"), str(directory), HEAD, plan.address(HEAD)]
    argv = ["sh", "-c", KEEPER, "rack-keeper", str(directory), *plan_namespaces(plan), *init]
    process = start_detached(argv, directory / "log" / "head.init", stdin=subprocess.PIPE)
    rack = Rack(plan=plan, dir=directory, keeper=process)
    try:
        write_rack_files(plan, directory)
        rack.tell_keeper_to_go()
        rack.power_on(*plan.nodes)
        if plan.slurm:
            rack.await_idle()
        yield rack
    finally:
        rack.stop()


def start_detached(argv: Sequence[str], log: Path, *, stdin: int) -> subprocess.Popen[bytes]:
    """Start a process that a Ctrl-C in the terminal does not reach, in an environment of its own."""
    environment = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}
    with log.open("ab") as out:
        return subprocess.Popen(
            argv, stdin=stdin, stdout=out, stderr=out, start_new_session=True, env=environment, cwd="/"
        )
