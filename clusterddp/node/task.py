"""What srun starts, once per rank: `python -m clusterddp.node.task RUN_DIR ATTEMPT`.

It starts its rank as a child of its own when its node's supervisor says so, so that Slurm's binding to cores, GPUs and
memory, and its accounting, hold for the rank; it stays for restarts of the gang, and leaves with the rank's exit code
when the supervisor lets it go. The first task of each node also starts that supervisor. What they say to each other is
listed in tasks.py.

It imports next to nothing: sixteen of these start at once on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clusterddp.dist.environment import COOKIE, SUPERVISOR_PID, cookie, inherited_environment
from clusterddp.dist.slurm_step import StepPlace, read_place
from clusterddp.errors import ClusterddpError
from clusterddp.node.processes import become_subreaper, signal_group, start_rank
from clusterddp.node.taskwire import MAX_PACKET, peer_of, socket_name

START_TIMEOUT_S = 120.0
"""How long the node's supervisor may take to be there, and all nodes to join."""
_GUARD_S = 25.0
"""How long the guard of a supervisor that was killed may take to put things in order."""
_RECORD_S = 8.0
"""How long whoever is left of the gang may take to record its end."""


def main() -> int:
    """Serve the node's supervisor; the exit code is the rank's."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # A handler and not SIG_IGN: what is ignored stays ignored in the rank.
        signal.signal(number, lambda *_: None)
    try:
        run_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
        place = read_place(os.environ)
        gang = _read_gang(run_dir, place)
        task = Task(run_dir, attempt, place, gang)
    except ClusterddpError as error:
        hint = f"; hint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"clusterddp: {socket.gethostname()}: {error.message}{hint}\n")
        return 1
    return task.serve()


class Task:
    """One task of the step."""

    def __init__(self, run_dir: Path, attempt: int, place: StepPlace, gang: dict[str, Any]) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._place = place
        self._rank_pid: int | None = None
        self._returncode: int | None = None
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        become_subreaper()
        self._name = socket_name(
            gang["token"],
            job=place.job_id,
            start=place.restart_count,
            step=place.step_id,
            attempt=attempt,
            node_rank=place.node_rank,
        )
        if place.local_rank == 0:
            self._start_supervisor(gang)
        self._sock = self._reach_supervisor()

    def serve(self) -> int:
        """Do what the supervisor says until it lets us go, or is gone."""
        binding = os.environ.get("SLURMD_TRES_BIND", "") + os.environ.get("SLURM_TRES_BIND", "")
        gpus = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "gpus_bound": "gpu:" in binding}
        self._say({"kind": "here", "rank": self._place.rank, **gpus})
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._reader, select.POLLIN)
        while True:
            poll.poll()
            self._look_at_children()
            words = self._hear()
            if words is None:
                continue
            if words["kind"] == "leave":
                self._await_end_of_supervisor()
                return self._exit_code(words["exit_code"])
            if words["kind"] == "gone":
                return self._survive()
            self._obey(words)

    def _obey(self, words: dict[str, Any]) -> None:
        if words["kind"] == "start":
            self._start_rank(words)
        elif words["kind"] == "signal" and self._rank_pid is not None:
            signal_group(self._rank_pid, words["number"])
        elif words["kind"] == "reap" and self._rank_pid is not None:
            os.waitpid(self._rank_pid, 0)
            self._rank_pid = None

    def _start_rank(self, words: dict[str, Any]) -> None:
        variables = {
            name: value
            for name, value in words["variables"].items()
            if name not in words["unless"] or name not in os.environ
        }
        environment = inherited_environment() | variables | {SUPERVISOR_PID: str(os.getpid())}
        self._returncode = None
        try:
            self._rank_pid = start_rank(
                Path(words["run_dir"]),
                environment=environment,
                stdout=Path(words["stdout"]),
                stderr=Path(words["stderr"]),
            )
        except OSError as error:
            self._say({"kind": "not_started", "error": str(error)})
        else:
            self._say({"kind": "started", "pid": self._rank_pid})

    def _look_at_children(self) -> None:
        """Report the rank's end; it stays a zombie, its pid its own, until the supervisor has taken note."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid == self._rank_pid:
                if self._returncode is None:
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    self._returncode = code
                    self._say({"kind": "ended", "returncode": code})
                return
            os.waitpid(ended.si_pid, 0)

    def _start_supervisor(self, gang: dict[str, Any]) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._name)
        listener.listen(1024)
        node_rank = self._place.node_rank
        log = os.open(
            self._run_dir / "launcher" / f"supervisor-{node_rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "clusterddp.node.supervisor"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=self._run_dir / "launcher",
            env=inherited_environment() | {COOKIE: cookie(gang["token"], f"s{node_rank}")},
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
        os.close(log)
        order = self._order_of_supervisor(gang) | {"tasks": listener.fileno()}
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        self._supervisor = process
        listener.close()

    def _order_of_supervisor(self, gang: dict[str, Any]) -> dict[str, Any]:
        place = self._place
        nodes = [
            {"node_rank": node_rank, "host": host, "ranks": list(ranks), "gpus": [], "slurm_chooses_gpus": True}
            for node_rank, (host, ranks) in enumerate(zip(place.hosts, place.ranks, strict=True))
        ]
        record = _read_json(self._run_dir / "run.json")
        return {
            "run_dir": str(self._run_dir),
            "gang": gang | {"nodes": nodes},
            "node_rank": place.node_rank,
            "attempt": self._attempt,
            "link": None,
            "parent_bound": False,
            "start_timeout_s": START_TIMEOUT_S,
            "slurm": {
                "job_id": place.job_id,
                "restart_count": place.restart_count,
                "used_restarts": max(0, self._attempt - int(record.get("base_attempt", 0))),
                "job_tag": record.get("job_tag"),
                "heads": [place.hosts[0], os.environ.get("SLURM_LAUNCH_NODE_IPADDR")],
            },
        }

    def _reach_supervisor(self) -> socket.socket:
        deadline = time.monotonic() + START_TIMEOUT_S
        pause_s = 0.01
        while True:
            sock = self._connect()
            if sock is not None:
                return sock
            if time.monotonic() >= deadline:
                raise ClusterddpError(
                    f"rank {self._place.rank}: the first task of this node did not come within {START_TIMEOUT_S:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)

    def _connect(self) -> socket.socket | None:
        """Connect to our supervisor, or whoever holds its socket; None: nobody does."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(self._name)
        except OSError:
            sock.close()
            return None
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            raise ClusterddpError(f"process {pid} of user {uid} poses as the supervisor of this node")
        return sock

    def _say(self, words: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(words).encode())
        except OSError:
            return  # it is gone, which is heard next

    def _hear(self) -> dict[str, Any] | None:
        try:
            packet = self._sock.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        return dict(json.loads(packet)) if packet else {"kind": "gone"}

    def _survive(self) -> int:
        """End the rank, for its supervisor is gone; leave when what is left of the gang has put things in order.

        Our exit code makes srun end the whole step, and with it whoever still has something to record.
        """
        if self._rank_pid is not None:
            signal_group(self._rank_pid, signal.SIGKILL)
            os.waitpid(self._rank_pid, 0)
            self._returncode = self._returncode if self._returncode is not None else -signal.SIGKILL
        # The supervisor's guard holds the same socket: a connection to it ends when the guard leaves.
        guard = self._connect()
        if guard is not None:
            guard.settimeout(_GUARD_S)
            with contextlib.suppress(OSError):
                guard.recv(1)
            guard.close()
        self._await_record()
        return self._exit_code(1)

    def _await_record(self) -> None:
        deadline = time.monotonic() + _RECORD_S
        attempts = self._run_dir / "attempts"
        while time.monotonic() < deadline:
            try:
                newest = max(int(name) for name in os.listdir(attempts) if name.isdigit())
                if (attempts / str(newest) / "end.json").exists():
                    return
            except (OSError, ValueError):
                return
            time.sleep(0.1)

    def _await_end_of_supervisor(self) -> None:
        """Stay until the supervisor has left: Slurm ends what is there when its last task has gone."""
        self._sock.settimeout(5.0)
        with contextlib.suppress(OSError):
            while self._sock.recv(MAX_PACKET):
                pass

    def _exit_code(self, otherwise: int) -> int:
        code = self._returncode
        if code is None:
            return otherwise
        return 128 - code if code < 0 else code or otherwise


def _read_gang(run_dir: Path, place: StepPlace) -> dict[str, Any]:
    gang: dict[str, Any] = _read_json(run_dir / "plan.json")["gang"]
    planned = sum(len(node["ranks"]) for node in gang["nodes"])
    if planned != place.world_size:
        raise ClusterddpError(f"the plan has {planned} ranks, srun has started {place.world_size} tasks")
    return gang


def _read_json(path: Path) -> dict[str, Any]:
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
