"""A task of Slurm's: srun starts `python -m clusterddp.places.slurm.task RUN_DIR ATTEMPT` per rank.

It starts its rank as its own child when the node's supervisor orders it, so that Slurm's binding to cores, GPUs and
memory, and its accounting, hold for the rank. It stays for restarts of the gang, and exits with the rank's exit code
when the supervisor lets it. tasks.py lists the messages between them. The first task of each node also starts that
supervisor, and forwards to it the signals that ask for a stop: with `proctrack/cgroup` Slurm signals its tasks and not
their children, with `proctrack/linuxproc` all of them, so the supervisor may receive a signal twice.

It imports next to nothing: sixteen of these start at once on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.processes import STOP_SIGNALS, become_subreaper, signal_group, start_rank
from clusterddp.node.stack_hook import peer_of
from clusterddp.ranks.environment import SUPERVISOR_PID, inherited_environment, rank_cookies
from clusterddp.ranks.slurm_step import StepPlace, read_place
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir

if TYPE_CHECKING:
    from clusterddp.run.supervisors import SupervisorOrder

MAX_PACKET = 1 << 20
_PREFIX = "\0clusterddp-"
"""The prefix of the names of our sockets; they are abstract and so in no directory."""
_ONE_DESCRIPTOR = socket.CMSG_LEN(4)
SUPERVISOR = "clusterddp.places.slurm.supervisor"
_START_TIMEOUT_S = 600.0
"""How long the node's supervisor may take to listen, where the plan of an older version has no limit."""
_GUARD_S = 45.0
"""How long the guard of a supervisor that was killed may take for its cleanup, while its storage is away."""
_RECORD_S = 8.0
"""How long the rest of the gang may take to record its end."""


def main() -> int:
    """Serve the node's supervisor; the exit code is the rank's."""
    try:
        task = Task(RunDir(Path(sys.argv[1])), int(sys.argv[2]))
        task.reach_supervisor()
        return task.serve()
    except ClusterddpError as error:
        hint = f"; hint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"clusterddp: {socket.gethostname()}: {error.message}{hint}\n")
        return 1


class Task:
    """One task of the step: it holds its rank for the supervisor of its node."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._forward: Callable[[int], object] = lambda number: None
        """Receives each signal that asks for a stop."""
        self.rank_pid: int | None = None
        self._returncode: int | None = None
        self._started = False
        """True once the rank was ordered to start."""
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            # A handler and not SIG_IGN: what is ignored stays ignored in the rank.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        become_subreaper()
        self._place = place = self.find_place()
        gang = self.read_gang()
        self._token = str(gang["token"])
        self._rank_cookies = rank_cookies(self._token, place.node_rank)
        self._name = socket_name(
            self._token,
            job=place.job_id,
            start=place.restart_count,
            step=place.step_id,
            attempt=attempt,
            node_rank=place.node_rank,
        )
        self._start_timeout_s = float(gang.get("start_timeout_s", _START_TIMEOUT_S))
        self._supervisor: subprocess.Popen[bytes] | None = None
        """Only in the first task of the node, which has started it."""
        self._sock: socket.socket
        if place.local_rank == 0:
            self._supervisor = self._start_supervisor(gang)
        self.begin(gang)

    def find_place(self) -> StepPlace:
        """Find the place of this task, and that of all ranks. Raises: ClusterddpError."""
        return read_place(os.environ)

    def read_gang(self) -> dict[str, Any]:
        """Read the gang from the plan, as JSON without its nodes. Raises: ClusterddpError: srun has other tasks."""
        gang: dict[str, Any] = read_plan_file(self._run.plan)["gang"]
        sizes = [len(node["ranks"]) for node in gang["nodes"] if node["ranks"]]  # the others are spares
        least = gang.get("min_nodes")
        planned = sum(sizes if least is None else sizes[: max(least, len(self._place.ranks))])
        if planned != self._place.world_size:
            raise ClusterddpError(f"the plan has {planned} ranks, srun has started {self._place.world_size} tasks")
        return gang

    def begin(self, gang: dict[str, Any]) -> None:
        """Do what need not wait for the supervisor."""

    def serve(self) -> int:
        """Obey the supervisor's orders until it lets this task exit, or has ended; return the exit code."""
        binding = os.environ.get("SLURMD_TRES_BIND", "") + os.environ.get("SLURM_TRES_BIND", "")
        gpus = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "gpus_bound": "gpu:" in binding}
        self._send({"kind": "here", "rank": self._place.rank, **gpus})
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._reader, select.POLLIN)
        while True:
            poll.poll()
            self._take_signals()
            self._look_at_children()
            order = self._receive()
            if order is None:
                continue
            if order["kind"] == "gone":
                return self._survive()
            if order["kind"] == "leave":
                self._await_end_of_supervisor()
                return self.exit_code(int(order["exit_code"]))
            self.obey(order)

    def _kill_rank(self) -> None:
        """Kill the rank, because its supervisor has ended."""
        if self.rank_pid is not None:
            signal_group(self.rank_pid, signal.SIGKILL)
            os.waitpid(self.rank_pid, 0)
            self._returncode = self._returncode if self._returncode is not None else -signal.SIGKILL

    def exit_code(self, otherwise: int) -> int:
        """Return the rank's exit code as a shell has it; `otherwise` where it is 0 or there is none."""
        code = self._returncode
        if code is None:
            return otherwise
        return 128 - code if code < 0 else code or otherwise

    def obey(self, order: dict[str, Any]) -> None:
        """Do what the supervisor orders."""
        if order["kind"] == "start":
            self._start(order)
        elif order["kind"] == "signal" and self.rank_pid is not None:
            signal_group(self.rank_pid, order["number"])
        elif order["kind"] == "reap" and self.rank_pid is not None:
            os.waitpid(self.rank_pid, 0)
            self.rank_pid = None

    master: Mapping[str, str | None] = {}
    """Address and port of the rank's own rendezvous, where its launcher has chosen them."""

    def start_rank(self, order: dict[str, Any]) -> int:
        """Start the rank; return its pid. Raises: OSError."""
        variables = {
            name: value
            for name, value in order["variables"].items()
            if name not in order["unless"] or name not in os.environ
        }
        inherited = {name: value for name, value in inherited_environment().items() if name not in order["without"]}
        return start_rank(
            Path(order["run_dir"]),
            environment=inherited | variables | {SUPERVISOR_PID: str(os.getpid())},
            stdout=Path(order["stdout"]),
            stderr=Path(order["stderr"]),
            listener=order.get("listener"),
            python=order["python"],
        )

    def _start(self, order: dict[str, Any]) -> None:
        self._started, self._returncode = True, None
        try:
            self.rank_pid = self.start_rank(order)
        except OSError as error:
            self._send({"kind": "not_started", "error": str(error)})
        else:
            self._send({"kind": "started", "pid": self.rank_pid, **self.master})
            self._look_at_children()  # a rank that has begun before may have ended
        if "listener" in order:
            os.close(order["listener"])

    def _take_signals(self) -> None:
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 4096):
                numbers |= set(data)
        for number in sorted(numbers):
            self.on_signal(number)

    def on_signal(self, number: int) -> None:
        """Tell the node's supervisor of a signal that asks for a stop."""
        if number in STOP_SIGNALS:
            self._forward(number)

    def on_rank_ended(self) -> None:
        """Do what is to be done before the supervisor learns that the rank has ended."""

    def _look_at_children(self) -> None:
        """Report the rank's end; it stays a zombie and keeps its pid until the supervisor sends `reap`."""
        while self._started:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid == self.rank_pid:
                if self._returncode is None:
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    self._returncode = code
                    self.on_rank_ended()
                    self._send({"kind": "ended", "returncode": code})
                return
            os.waitpid(ended.si_pid, 0)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(message).encode())
        except OSError:
            return  # it has ended, which the next receive finds

    def _receive(self) -> dict[str, Any] | None:
        try:
            # Not socket.recv_fds, which ignores its flags, and so would wait (Python 3.11).
            packet, ancillary, _, _ = self._sock.recvmsg(MAX_PACKET, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            packet, ancillary = b"", []
        message = dict(json.loads(packet)) if packet else {"kind": "gone"}
        given = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        return message | ({"listener": int.from_bytes(given[0][:4], sys.byteorder)} if given and given[0] else {})

    def _start_supervisor(self, gang: dict[str, Any]) -> subprocess.Popen[bytes]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._name)
        listener.listen(1024)
        heads, tasks = self.find_heads(), listener.fileno()
        order = order_supervisor(self._run, self._attempt, gang, self._place, heads=heads, tasks=tasks)
        process = start_deaf(order)
        # `send_signal` first checks whether the process was reaped: its pid may be another process's by then.
        self._forward = process.send_signal
        listener.close()
        return process

    def find_heads(self) -> tuple[str, ...]:
        """Return names and addresses of node 0's host, at which the other nodes look for its supervisor."""
        return heads_of(self._place)

    def reach_supervisor(self) -> None:
        """Connect to the supervisor of the node. One that has ended, as its guard, is found by `serve`.

        Raises: ClusterddpError: the first task of the node has not started one in time.
        """
        deadline = time.monotonic() + self._start_timeout_s
        pause_s = 0.01
        while True:
            sock = connect(self._name)
            if sock is None and (self._supervisor is not None or self._run.attempt(self._attempt).end.exists()):
                sock, other = socket.socketpair()
                other.close()
            if sock is not None:
                self._sock = sock
                return
            if time.monotonic() >= deadline:
                raise ClusterddpError(
                    f"rank {self._place.rank}: the first task of this node did not start within "
                    f"{self._start_timeout_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)

    def _survive(self) -> int:
        """Kill the rank, because its supervisor has ended; return when the rest of the gang has recorded the end.

        Our exit code makes srun end the whole step, and so every process that has still something to record.
        """
        self._kill_rank()
        # The supervisor's guard holds the same socket: a connection to it ends when the guard exits.
        guard = connect(self._name)
        if guard is not None:
            guard.settimeout(_GUARD_S)
            with contextlib.suppress(OSError):
                guard.recv(1)
            guard.close()
        end_processes(*self._rank_cookies, timeout_s=5.0)  # the guard has done this, unless it was killed, too
        self._await_record()
        return self.exit_code(1)

    def _await_record(self) -> None:
        await_record(self._run)

    def _await_end_of_supervisor(self) -> None:
        """Stay until the supervisor has exited: Slurm ends what is left when its last task has."""
        self._sock.settimeout(5.0)
        with contextlib.suppress(OSError):
            while self._sock.recv(MAX_PACKET):
                pass


def heads_of(place: StepPlace) -> tuple[str, ...]:
    """Return names and addresses of the first host of a step."""
    return tuple(filter(None, (place.hosts[0], os.environ.get("SLURM_LAUNCH_NODE_IPADDR"))))


def order_supervisor(
    run: RunDir,
    attempt: int,
    gang: dict[str, Any],
    place: StepPlace,
    *,
    heads: tuple[str, ...],
    tasks: int | None,
) -> SupervisorOrder:
    """Return the order for the supervisor of the node that this task is on.

    `tasks`: as in the order; None: the supervisor starts the ranks.
    """
    # Only in the first task of a node, because the others import next to nothing.
    from clusterddp.run.gang import Gang
    from clusterddp.run.supervisors import JobOrder, SupervisorOrder

    record = read_plan_file(run.record)
    # The batch process chooses the nodes of an attempt, and the loss of one ends its step.
    whole = Gang.from_json(gang | {"nodes": place.nodes, "min_nodes": None})
    if whole.threads_per_rank is None:
        cores = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
        threads = max(1, cores // len(whole.carried_by(place.ranks[place.node_rank])))
        whole = dataclasses.replace(whole, threads_per_rank=threads)
    return SupervisorOrder(
        run_dir=run.path,
        gang=whole,
        node_rank=place.node_rank,
        attempt=attempt,
        step=run.step,
        link=None,
        parent_bound=tasks is None,
        one_node=tasks is None,
        tasks=tasks,
        job=JobOrder(
            job_id=place.job_id,
            restart_count=place.restart_count,
            used_restarts=max(0, attempt - int(record.get("base_attempt", 0))),
            job_tag=record.get("job_tag"),
            heads=heads,
        ),
    )


def start_deaf(order: SupervisorOrder) -> subprocess.Popen[bytes]:
    """Start a supervisor that receives signals once it handles them: at its start one would end it."""
    from clusterddp.run.supervisors import start_supervisor

    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return start_supervisor(order, inherited_environment(), answers=False, module=SUPERVISOR)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_record(run: RunDir) -> None:
    """Wait until the end of the newest attempt is recorded, or until there is no hope of it."""
    deadline = time.monotonic() + _RECORD_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):  # storage that is away may come back
            if run.newest_attempt().end.exists():
                return
        time.sleep(0.1)


def connect(name: str) -> socket.socket | None:
    """Connect to the supervisor, or to its guard, which holds the same socket; None: no process listens.

    Raises: ClusterddpError: another user's process has taken the name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise ClusterddpError(f"process {pid} of user {uid} listens in place of the supervisor of this node")
    return sock


def socket_name(token: str, *, job: str, start: int, step: str, attempt: int, node_rank: int) -> str:
    """Name the socket of one node for one step of one start of a job."""
    facts = f"tasks of {token}:{job}:{start}:{step}:{attempt}:{node_rank}"
    return _PREFIX + hashlib.sha256(facts.encode()).hexdigest()[:40]


def read_plan_file(path: Path) -> dict[str, Any]:
    """Read a record of the run without what would check it. Raises: ClusterddpError: it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError) as error:
        raise ClusterddpError(
            f"{path} cannot be read: {error}",
            hint="the run directory must be on storage that all nodes share; --runs DIR names another one",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
