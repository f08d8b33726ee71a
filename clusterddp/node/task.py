"""A task of Slurm's: srun starts `python -m clusterddp.node.task RUN_DIR ATTEMPT` per rank, with torchrun per node.

It starts its rank as its own child when the node's supervisor orders it, so that Slurm's binding to cores, GPUs and
memory, and its accounting, hold for the rank. It stays for restarts of the gang, and exits with the rank's exit code
when the supervisor lets it (holder.py). The first task of each node also starts that supervisor, and forwards to it the
signals that ask for a stop: with `proctrack/cgroup` Slurm signals its tasks and not their children, with
`proctrack/linuxproc` all of them, so the supervisor may receive a signal twice. With torchrun a task does nothing else.

It imports next to nothing: sixteen of these start at once on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.node.holder import Holder, connect
from clusterddp.node.processes import STOP_SIGNALS
from clusterddp.node.taskwire import MAX_PACKET, socket_name
from clusterddp.ranks.environment import START_AGAIN, inherited_environment
from clusterddp.ranks.slurm_step import StepPlace, read_place

_START_TIMEOUT_S = 600.0
"""How long the node's supervisor may take to listen, where the plan of an older version has no limit."""
_GUARD_S = 45.0
"""How long the guard of a supervisor that was killed may take for its cleanup, while its storage is away."""
_RECORD_S = 8.0
"""How long the rest of the gang may take to record its end."""


def main() -> int:
    """Serve the node's supervisor; the exit code is the rank's."""
    holder = Holder()
    try:
        run_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
        place = read_place(os.environ)
        gang = _read_gang(run_dir, place)
        task = Task(run_dir, attempt, place, gang, holder)
    except ClusterddpError as error:
        hint = f"; hint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"clusterddp: {socket.gethostname()}: {error.message}{hint}\n")
        return 1
    return task.serve()


class Task:
    """One task of the step."""

    def __init__(self, run_dir: Path, attempt: int, place: StepPlace, gang: dict[str, Any], holder: Holder) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._place = place
        self._holder = holder
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
        self._sock = self._reach_supervisor(float(gang.get("start_timeout_s", _START_TIMEOUT_S)))

    def serve(self) -> int:
        """Carry out the supervisor's orders until it lets this task exit, or has ended."""
        binding = os.environ.get("SLURMD_TRES_BIND", "") + os.environ.get("SLURM_TRES_BIND", "")
        gpus = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "gpus_bound": "gpu:" in binding}
        exit_code = self._holder.serve(self._sock, {"rank": self._place.rank, **gpus})
        if exit_code is None:
            return self._survive()
        self._await_end_of_supervisor()
        return self._holder.exit_code(exit_code)

    def _start_supervisor(self, gang: dict[str, Any]) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._name)
        listener.listen(1024)
        # Blocked until it handles them: at its start a signal would end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = self._start(gang, listener)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._supervisor = process
        # `send_signal` first checks whether the process was reaped: its pid may be another process's by then.
        self._holder.forward = process.send_signal
        listener.close()

    def _start(self, gang: dict[str, Any], listener: socket.socket) -> subprocess.Popen[bytes]:
        # Only here, because the other tasks of the node import next to nothing.
        from clusterddp.run.gang import Gang
        from clusterddp.run.supervisors import SlurmOrder, SupervisorOrder, start_supervisor

        place = self._place
        record = _read_json(self._run_dir / "run.json")
        order = SupervisorOrder(
            run_dir=self._run_dir,
            gang=Gang.from_json(gang | {"nodes": self._nodes_of_step(gang)}),
            node_rank=place.node_rank,
            attempt=self._attempt,
            link=None,
            parent_bound=False,
            tasks=listener.fileno(),
            slurm=SlurmOrder(
                job_id=place.job_id,
                restart_count=place.restart_count,
                used_restarts=max(0, self._attempt - int(record.get("base_attempt", 0))),
                job_tag=record.get("job_tag"),
                heads=tuple(filter(None, (place.hosts[0], os.environ.get("SLURM_LAUNCH_NODE_IPADDR")))),
                start_again=tuple(json.loads(os.environ.pop(START_AGAIN, "[]"))),
            ),
        )
        return start_supervisor(order, inherited_environment(), answers=False)

    def _nodes_of_step(self, gang: dict[str, Any]) -> list[dict[str, Any]]:
        place = self._place
        # With torchrun a task is not a rank but a node's, and the plan has its ranks.
        shares = [node["ranks"] for node in gang["nodes"]] if _one_for_each_node(gang) else place.ranks
        return [
            {"node_rank": node_rank, "host": host, "ranks": list(ranks), "gpus": [], "slurm_chooses_gpus": True}
            for node_rank, (host, ranks) in enumerate(zip(place.hosts, shares, strict=True))
        ]

    def _reach_supervisor(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        pause_s = 0.01
        while True:
            sock = connect(self._name)
            if sock is not None:
                return sock
            if time.monotonic() >= deadline:
                raise ClusterddpError(
                    f"rank {self._place.rank}: the first task of this node did not start within {timeout_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)

    def _survive(self) -> int:
        """Kill the rank, because its supervisor has ended; return when the rest of the gang has recorded the end.

        Our exit code makes srun end the whole step, and so every process that has still something to record.
        """
        self._holder.kill_rank()
        # The supervisor's guard holds the same socket: a connection to it ends when the guard exits.
        guard = connect(self._name)
        if guard is not None:
            guard.settimeout(_GUARD_S)
            with contextlib.suppress(OSError):
                guard.recv(1)
            guard.close()
        self._await_record()
        return self._holder.exit_code(1)

    def _await_record(self) -> None:
        deadline = time.monotonic() + _RECORD_S
        attempts = self._run_dir / "attempts"
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):  # storage that is away may come back
                newest = max(int(name) for name in os.listdir(attempts) if name.isdigit())
                if (attempts / str(newest) / "end.json").exists():
                    return
            time.sleep(0.1)

    def _await_end_of_supervisor(self) -> None:
        """Stay until the supervisor has exited: Slurm ends what is left when its last task has."""
        self._sock.settimeout(5.0)
        with contextlib.suppress(OSError):
            while self._sock.recv(MAX_PACKET):
                pass


def _read_gang(run_dir: Path, place: StepPlace) -> dict[str, Any]:
    gang: dict[str, Any] = _read_json(run_dir / "plan.json")["gang"]
    what = "nodes" if _one_for_each_node(gang) else "ranks"
    planned = len(gang["nodes"]) if what == "nodes" else sum(len(node["ranks"]) for node in gang["nodes"])
    if planned != place.world_size:
        raise ClusterddpError(f"the plan has {planned} {what}, srun has started {place.world_size} tasks")
    return gang


def _one_for_each_node(gang: dict[str, Any]) -> bool:
    return gang.get("start") == "torchrun"


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
