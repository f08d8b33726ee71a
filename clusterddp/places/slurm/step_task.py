"""A task of a step of a batch script: the launcher that the script calls starts it in place of the program of a rank.

    srun OPTIONS python -m clusterddp.places.slurm.step_task srun RUN_DIR ATTEMPT STEP -- python train.py ...

It is a `Task` whose rank is that program, as it is: the same environment, working directory, standard input and
signals, its output where it went and in a log, and its exit code or signal for the launcher. Variables that torchrun
would set are added where there are none. Where the ranks cannot be watched, the program runs without us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import tty
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from clusterddp.errors import ClusterddpError
from clusterddp.network.hostlist import expand
from clusterddp.network.interface import LOOPBACK_ADDRESS, addresses_of, interface_towards, is_loopback
from clusterddp.node.processes import PASSED_ON, lead_group, leave_to_reap
from clusterddp.places.slurm.step_command import launcher_argv
from clusterddp.places.slurm.task import Task, read_plan_file
from clusterddp.ranks.environment import COOKIE, ERROR_FILE, NCCL_VARIABLES, PLACE_VARIABLES, STEP
from clusterddp.ranks.launched import find_place
from clusterddp.ranks.slurm_step import StepPlace, read_place
from clusterddp.run.cleanup import marking
from clusterddp.run.directory import RunDir, make_attempt_dirs
from clusterddp.run.gang import Gang
from clusterddp.run.record import log_event
from clusterddp.run.steps import next_round
from clusterddp.system.files import MAX_RECORD_BYTES, open_log, read_regular, write_bytes, write_json
from clusterddp.system.processes import end_by

HOOK = Path(__file__).parents[2] / "node" / "hook"
"""In the PYTHONPATH of ranks: what lets the supervisor ask a rank's Python where it is."""
ADDED = PLACE_VARIABLES | {ERROR_FILE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *NCCL_VARIABLES}
"""The variables that a rank gets where it has none, besides those that begin with CLUSTERDDP_."""
_START_TIMEOUT_S = 120.0
_DRAIN_S = 2.0
"""How long the output may stay open after the end of the program: by what it has left behind."""


def main() -> int:
    """Run the program; the exit code is its own, and so is a signal that ends it."""
    launcher, run_dir, attempt, step, _, *program = sys.argv[1:]
    run = RunDir(Path(run_dir), step=step)
    inner = launcher_argv(program, run, int(attempt))
    if inner is not None:
        run_plainly(inner)  # its workers are the ranks
    task: StepTask | None = None
    try:
        task = StepTask(run, int(attempt), launcher, program)
        task.reach_supervisor()
    except (ClusterddpError, OSError, ValueError) as error:
        if task is None:
            log_unwatched(run, str(error))
            run_plainly(program)
        code = task.run_unwatched(str(error))
    else:
        code = task.serve()
    for number in PASSED_ON:  # at the first exit code that is not 0 the launcher signals the tasks that still exit
        signal.signal(number, signal.SIG_IGN)
    return code if code >= 0 else end_by(-code)


class StepTask(Task):
    """Holds the program of one rank of a step."""

    def __init__(self, run: RunDir, attempt: int, launcher: str, program: Sequence[str]) -> None:
        self._launcher = launcher
        self._program = program
        self._ordered = False
        """True once the supervisor has ended the rank because of something else."""
        self._pending: list[int] = []
        """Signals that came before the start of the program."""
        self._ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
        self._copies: list[threading.Thread] = []
        self.master = {name.lower(): os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) if launcher == "torchrun" else 0
        run = next_round(run, attempt, restarts)
        claim = read_plan_file(RunDir(run.path).attempt(attempt).claim)
        self._slurm_signals_all = launcher == "srun" and claim.get("signals") == "all"
        super().__init__(run, attempt)
        for number in PASSED_ON:
            signal.signal(number, lambda *_: None)

    def find_place(self) -> StepPlace:
        return read_place(os.environ) if self._launcher == "srun" else find_place_of(self._launcher, os.environ)

    def read_gang(self) -> dict[str, Any]:
        gang: dict[str, Any] = read_plan_file(self._run.plan)["gang"]
        on_cpu = not (os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES"))
        entry = {
            "kind": "command",
            "target": self._program[0],
            "words": list(self._program[1:]),
            "working_dir": str(Path.cwd()),
            "unchanged": True,
        }
        place = self._place
        gang |= {
            "token": f"{gang['token']}.{self._run.step}",
            "nodes": place.nodes,
            "entry": entry,
            "restarts": 0,
            "on_cpu": on_cpu,
            "backend": "gloo" if on_cpu else "nccl",
            "start_timeout_s": _START_TIMEOUT_S,
        }
        if place.node_rank == 0 and place.local_rank == 0:
            attempt = self._run.attempt(self._attempt)
            write_json(attempt.gang, gang)
        return gang

    def find_heads(self) -> tuple[str, ...]:
        own = os.environ.get("MASTER_ADDR") if self._launcher == "torchrun" else None
        on_one_machine = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") == LOOPBACK_ADDRESS  # without Slurm
        return (own,) if own and not on_one_machine else super().find_heads()

    def begin(self, gang: dict[str, Any]) -> None:
        """Start the program at once where its ranks have their rendezvous: it imports while the supervisors meet."""
        if not all(self.master.values()):
            return
        place, attempt = self._place, self._run.attempt(self._attempt)
        with contextlib.suppress(ClusterddpError, ValueError):  # the head chooses then
            ranks = Gang.from_json(gang | {"interface": gang.get("interface") or self._find_interface()})
            variables = ranks.variables_of(
                place.rank,
                run_dir=str(self._run.path),
                attempt=self._attempt,
                step=self._run.step,
                master_port=str(self.master["master_port"]),
            )
            make_attempt_dirs(attempt)
            values = {name: variable.value for name, variable in variables.items()}
            outputs = {"stdout": attempt.stdout(place.rank), "stderr": attempt.stderr(place.rank)}
            self.rank_pid = self.start_rank({"variables": values, **outputs})

    def _find_interface(self) -> str | None:
        """Return the interface towards another node of the step; None: all ranks are on one host.

        Raises: ClusterddpError: no name of another node leads there.
        """
        others = [host for host in dict.fromkeys(self._place.hosts) if host != self._place.host]
        if not others:
            return None
        found = [address for host in others[:2] for address in addresses_of(host) if not is_loopback(address)]
        if not found:
            raise ClusterddpError(f"{others[0]} is not resolved")
        return interface_towards(found[0]).name

    def start_rank(self, order: dict[str, Any]) -> int:
        if self.rank_pid is not None:
            return self.rank_pid  # it has begun
        variables = {
            name: value
            for name, value in order["variables"].items()
            if name.startswith("CLUSTERDDP_") or (name in ADDED and name not in os.environ)
        }
        others = [
            folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in {"", str(HOOK)}
        ]
        path = os.pathsep.join((str(HOOK), *others))
        environment = {**os.environ, **variables, "PYTHONPATH": path, STEP: str(self._run.step)}
        try:
            process = self._popen(self._program, environment)
        except OSError as error:  # a rank that ends as it would without us, with Slurm's message
            text = f"error: execve(): {self._program[0]}: {error.strerror}"
            process = self._popen(("/bin/sh", "-c", 'echo "$0" >&2; exit "$1"', text, str(error.errno)), environment)
        for target, log in ((1, order["stdout"]), (2, order["stderr"])):
            thread = threading.Thread(target=_copy, args=(self._outputs[target], target, Path(log)), daemon=True)
            thread.start()
            self._copies.append(thread)
        for number in self._pending:
            os.kill(process.pid, number)
        return leave_to_reap(process)

    def _popen(self, program: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a program, whose output goes to pipes; to a terminal where the task has one (`srun --unbuffered`)."""
        ends = {target: _open_terminal() if os.isatty(target) else os.pipe() for target in (1, 2)}
        try:
            with marking(environment[COOKIE]):
                process = subprocess.Popen(
                    program,
                    stdout=ends[1][1],
                    stderr=ends[2][1],
                    env=environment,
                    close_fds=False,  # a launcher's connection, such as PMI_FD, is the program's
                    preexec_fn=self._become_program,  # noqa: PLW1509  the threads begin afterwards
                )
        finally:
            for _, writer in ends.values():
                os.close(writer)
        self._outputs = {target: reader for target, (reader, _) in ends.items()}
        return process

    def _become_program(self) -> None:
        """In the child: ignore the signals that it would ignore without us."""
        lead_group()
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)

    def on_signal(self, number: int) -> None:
        super().on_signal(number)
        if number == signal.SIGCHLD:
            return
        if self.rank_pid is None:
            self._pending.append(number)
        elif not self._slurm_signals_all and self._returncode is None:
            os.kill(self.rank_pid, number)

    def on_rank_ended(self) -> None:
        for thread in self._copies:
            thread.join(_DRAIN_S)
        named, ours = os.environ.get(ERROR_FILE), self._run.attempt(self._attempt).error_file(self._place.rank)
        if named and Path(named) != ours and not ours.exists():
            with contextlib.suppress(OSError, ClusterddpError):  # torch's @record has written it
                write_bytes(ours, read_regular(Path(named), MAX_RECORD_BYTES))

    def obey(self, order: dict[str, Any]) -> None:
        self._ordered |= order["kind"] == "signal"
        super().obey(order)

    def exit_code(self, otherwise: int) -> int:
        """Return what the program ended with, negative for a signal; `otherwise` where it was ended by an order.

        Before the order to start, 0 says that nothing has failed: the supervisors have not found each other in time.
        """
        if self._started or self._returncode is not None:
            return otherwise if self._ordered or self._returncode is None else self._returncode
        if otherwise == 0:
            return self.run_unwatched("the supervisors of the step did not find each other in time")
        self._kill_rank()
        return otherwise

    def run_unwatched(self, why: str) -> int:
        """Let the program run without its supervisor, and record why; return its exit code, negative for a signal."""
        log_unwatched(self._run, why)
        if self.rank_pid is None:
            run_plainly(self._program)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: self.on_signal(number))
        self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.rank_pid, 0)[1])
        self.on_rank_ended()
        return self._returncode

    def _await_record(self) -> None:
        """Record the end of a supervisor that has not met the others: they do not know of it."""
        if self._supervisor is not None and not self._started:
            from clusterddp.run.attempts import close_attempt, failed, spell_exit
            from clusterddp.run.supervisors import supervisor_log

            node = f"node {self._place.node_rank} on {self._place.host}"
            ended = spell_exit(self._supervisor.wait())
            log = supervisor_log(self._run, self._place.node_rank)
            error = f"supervisor of {node} (pid {self._supervisor.pid}) {ended} before it had met the others"
            end = failed(error, host=self._place.host, log=str(log.relative_to(self._run.path)))
            close_attempt(self._run.attempt(self._attempt), end, self._token)
        super()._await_record()


def log_unwatched(step: RunDir, why: str) -> None:
    """Record, where the storage takes it, why ranks of a step run without being watched."""
    with contextlib.suppress(ClusterddpError, OSError):
        log_event(step, "step_not_watched", host=socket.gethostname(), error=why)


def find_place_of(launcher: str, environ: Mapping[str, str]) -> StepPlace:
    """Find the place of a rank that torchrun, mpirun or deepspeed has started.

    Raises: ClusterddpError: its nodes have different numbers of ranks, or the ranks of a node are no block.
    """
    found = find_place({name: value for name, value in environ.items() if name != "CLUSTERDDP_RUN"})  # an outer task's
    rank, world = found.rank, found.world_size
    local, size = found.local_rank or 0, found.local_world_size or world
    node = rank // size if found.node_rank is None else found.node_rank
    if world % size or rank != node * size + local:
        raise ClusterddpError(f"{launcher} has placed rank {rank} of {world} as number {local} of {size} on its node")
    own = environ.get("SLURMD_NODENAME") or socket.gethostname()
    num_nodes = world // size
    listed = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or own)
    # torchrun's c10d numbers its agents by the names of their hosts, the other launchers in the order of the list.
    orders = (sorted(listed)[:num_nodes], list(listed[:num_nodes]), [f"(node {number})" for number in range(num_nodes)])
    hosts = next((hosts for hosts in orders if len(hosts) == num_nodes and hosts[node] == own), orders[-1])
    hosts[node] = own
    return StepPlace(
        job_id=environ.get("SLURM_JOB_ID", ""),
        step_id=environ.get("SLURM_STEP_ID", ""),
        restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
        hosts=tuple(hosts),
        ranks=tuple(tuple(range(number * size, (number + 1) * size)) for number in range(num_nodes)),
        rank=rank,
        local_rank=local,
        node_rank=node,
    )


def _open_terminal() -> tuple[int, int]:
    """Open a terminal that changes no byte; return the end to read, and the program's."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    return reader, writer


def _copy(source: int, target: int, log: Path) -> None:
    """Copy the output of the program to where it went, and to its log, until it ends."""
    with contextlib.suppress(OSError):
        kept = open_log(log)
        while data := os.read(source, 1 << 16):
            with contextlib.suppress(OSError):  # a full disk takes no log
                kept.write(data)
                kept.flush()
            while data:
                data = data[os.write(target, data) :]
    with contextlib.suppress(OSError):
        os.close(source)  # nobody reads it any more: the program gets SIGPIPE, as without us


def run_plainly(program: Sequence[str]) -> NoReturn:
    """Become the program, without ranks that are watched; the exit codes of a failure are a shell's."""
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL) or number == signal.SIGPIPE:
                signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], list(program))
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        os._exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    sys.exit(main())
