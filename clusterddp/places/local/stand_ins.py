"""Stand-ins for Slurm's commands, for a batch script that runs without Slurm: srun, scontrol, sbatch and others.

    python -m clusterddp.places.local.stand_ins JOB_FILE NAME ARGS

JOB_FILE has what pretended_job.py knows of the job. All of its nodes are this machine: 127.0.0.1, 127.0.0.2 and so on.
What srun does is what Slurm's does, as tests/rack/places/test_stand_ins.py compares it: how many tasks are on which
node, their variables, where standard input and output go, signals, messages, exit code.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.network.hostlist import compress, compress_counts, expand
from clusterddp.run.stop import KILL_WAIT_S
from clusterddp.spec.launch_options import SBATCH, SRUN, Word, take_options
from clusterddp.system.processes import die_with_parent

COMMANDS = ("srun", "scontrol", "sbatch", "squeue", "sacct", "sinfo", "scancel", "sstat", "module", "ml")
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = {*_FORWARDED, *_ENDING, signal.SIGINT, signal.SIGCHLD}


def main() -> int:
    """Do what the command is asked for."""
    job_file, name, *words = sys.argv[1:]
    try:
        with open(job_file, encoding="utf-8") as file:
            job = json.load(file)
        if name == "srun":
            return srun(words, job, job_file)
        if name in {"scontrol", "sbatch"}:
            return scontrol(words, job) if name == "scontrol" else sbatch(words, job, job_file)
    except UsageError as error:
        _say(f"{name}: {error.message}")
        return 255
    except ClusterddpError as error:
        _say(f"{name}: error: {error.message}")
        return 1
    if name in {"module", "ml"}:
        _say(f"clusterddp: there are no environment modules here: {name} {' '.join(words)} does nothing")
        return 0
    _say(f"clusterddp: {name} asks Slurm, and this script runs without it (--launcher local)")
    return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the tasks of a step are."""

    nodes: tuple[str, ...]
    tasks: tuple[tuple[int, ...], ...]
    """By node, in the order of their local numbers."""

    @property
    def counts(self) -> str:
        return compress_counts([len(tasks) for tasks in self.tasks])

    @property
    def num_tasks(self) -> int:
        return sum(map(len, self.tasks))


def lay_out(given: dict[str, str], environ: Mapping[str, str]) -> Layout:
    """Place the tasks of an srun by its options, and by the variables of its job; drop an option that it ignores.

    Raises: ClusterddpError: Slurm would refuse the step. UsageError: an option is wrong.
    """
    job_nodes = expand(environ.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    written = given.get("nodes") or environ.get("SLURM_NNODES") or str(len(job_nodes))
    num_nodes = _number("--nodes", written.rpartition("-")[2])
    fewest = _number("--nodes", written.partition("-")[0])
    if fewest > len(job_nodes):
        raise ClusterddpError(f"Only allocated {len(job_nodes)} nodes asked for {fewest}")
    per_node = given.get("ntasks_per_node") or given.get("tasks_per_node") or environ.get("SLURM_NTASKS_PER_NODE")
    wanted = given.get("ntasks") or environ.get("SLURM_NTASKS")
    num_nodes = min(num_nodes, len(job_nodes))
    num_tasks = _number("--ntasks", wanted) if wanted else num_nodes * _number("--ntasks-per-node", per_node or "1")
    if per_node and num_tasks // num_nodes > int(per_node):
        _say(
            f"srun: Warning: can't honor --ntasks-per-node set to {per_node} which doesn't match the requested tasks "
            f"{num_tasks} with the number of requested nodes {num_nodes}. Ignoring --ntasks-per-node."
        )
        given.pop("ntasks_per_node", None)
    if num_tasks < num_nodes:
        _say(f"srun: Warning: can't run {num_tasks} processes on {num_nodes} nodes, setting nnodes to {num_tasks}")
        num_nodes = num_tasks
    nodes = _choose_nodes(given, job_nodes, num_nodes)
    return Layout(nodes=nodes, tasks=_distribute(num_tasks, len(nodes), given.get("distribution", "block")))


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 100_000):
        raise UsageError(f'error: invalid number for {option}: "{text}"')
    return int(text)


def _choose_nodes(given: Mapping[str, str], job_nodes: tuple[str, ...], num_nodes: int) -> tuple[str, ...]:
    """Return the nodes of a step, in the order that they have in the job."""
    listed = expand(given.get("nodelist", ""))
    excluded = expand(given.get("exclude", ""))
    allowed = [node for node in job_nodes[int(given.get("relative") or 0) :] if node not in excluded]
    first = [node for node in allowed if node in listed]
    chosen = (first + [node for node in allowed if node not in listed])[:num_nodes]
    if not set(listed) <= set(job_nodes) or len(chosen) < num_nodes:
        raise ClusterddpError("Unable to create step for job: Requested node configuration is not available")
    return tuple(node for node in job_nodes if node in chosen)


def _distribute(num_tasks: int, num_nodes: int, distribution: str) -> tuple[tuple[int, ...], ...]:
    method, _, size = distribution.partition(":")[0].partition("=")
    if method in {"cyclic", "plane"}:
        width = int(size or 1)
        places = [number // width % num_nodes for number in range(num_tasks)]
    elif method in {"block", "*", ""} or method.startswith(("pack", "nopack")):
        counts = [num_tasks // num_nodes + (node < num_tasks % num_nodes) for node in range(num_nodes)]
        places = [node for node, count in enumerate(counts) for _ in range(count)]
    else:
        raise UsageError(f"--distribution={distribution}: clusterddp's stand-in has block, cyclic and plane")
    return tuple(tuple(number for number, at in enumerate(places) if at == node) for node in range(num_nodes))


def srun(words: Sequence[str], job: Mapping[str, Any], job_file: str) -> int:
    """Run a step: start its tasks on this machine, pass signals on, and return the highest of their exit codes."""
    options, rest = take_options([Word(word) for word in words], SRUN)
    given = {option.name: option.value.text if option.value else "" for option in options}
    program = [word.text for word in rest]
    if "version" in given:
        print("slurm 0.0 (the stand-in of clusterddp)")
        return 0
    if not program:
        raise ClusterddpError("No command given to execute.")
    for name in ("multi_prog", "het_group"):
        if name in given or (name == "het_group" and ":" in program):
            raise ClusterddpError(f"clusterddp's stand-in for srun has no --{name.replace('_', '-')}")
    if container := {"container", "container_image", "container_name"} & given.keys():
        _say(f"clusterddp: without Slurm the program runs in no container: --{container.pop().replace('_', '-')}")
    layout = lay_out(given, os.environ)
    _note_processors(given, layout)
    with Step(given, layout, job, next_number(f"{job_file}.steps")) as step:
        step.start(program)
        return step.wait()


def _note_processors(given: Mapping[str, str], layout: Layout) -> None:
    """Say where Slurm would refuse the step, unless the nodes of the real job have more processors than it asks for."""
    per_task = int(given.get("cpus_per_task") or os.environ.get("SLURM_CPUS_PER_TASK") or 1)
    has, needed = int(os.environ.get("SLURM_CPUS_ON_NODE") or 1), per_task * max(map(len, layout.tasks))
    if needed > has and "overcommit" not in given:
        _say(f"clusterddp: this step needs {needed} processors on a node, the job asks for {has}: Slurm may refuse it")


def next_number(path: str) -> int:
    """Count the calls with this file, from 0."""
    with open(path, "ab") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        number = os.fstat(counter.fileno()).st_size
        counter.write(b".")
    return number


class Step:
    """The tasks of one srun, as processes of this machine."""

    def __init__(self, given: Mapping[str, str], layout: Layout, job: Mapping[str, Any], number: int) -> None:
        self._given = given
        self._layout = layout
        self._job = job
        self._number = number
        self._tasks: dict[int, subprocess.Popen[bytes]] = {}
        self._hosts = {task: host for host, tasks in zip(layout.nodes, layout.tasks, strict=True) for task in tasks}
        self._codes: dict[int, int] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._labels: list[threading.Thread] = []
        self._kill_at = float("inf")
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # `wait` takes them
        for signum in _SIGNALS - {signal.SIGCHLD}:
            signal.signal(signum, lambda *_: None)  # bash has a command in the background ignore SIGINT

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)

    def start(self, program: Sequence[str]) -> None:
        """Start all tasks."""
        feeds: list[IO[bytes]] = []
        readers: list[tuple[IO[bytes], int, int]] = []
        labelled = "label" in self._given
        for node, (host, tasks) in enumerate(zip(self._layout.nodes, self._layout.tasks, strict=True)):
            for local, task in enumerate(tasks):
                environment = self._environment(node, local, task)
                stdin = self._input(task)
                outputs = [self._output(stream, task, node, host) for stream in ("output", "error")]
                # Slurm looks in the PATH that the task has.
                found = shutil.which(program[0], path=environment.get("PATH", ""))
                try:
                    process = subprocess.Popen(
                        list(program),
                        executable=found or Path(program[0]).absolute(),
                        stdin=stdin,
                        stdout=subprocess.PIPE if labelled and outputs[0] is None else outputs[0],
                        stderr=subprocess.PIPE if labelled and outputs[1] is None else outputs[1],
                        cwd=self._directory(host),
                        env=environment,
                        preexec_fn=_become_task,  # noqa: PLW1509  the threads begin afterwards
                    )
                except OSError as error:
                    _say(f"slurmstepd-{host}: error: execve(): {program[0]}: {error.strerror}")
                    self._ended(task, error.errno or errno.ENOENT)
                    continue
                self._tasks[task] = process
                feeds += [process.stdin] if process.stdin else []
                readers += [
                    (source, 1 + at, task) for at, source in enumerate((process.stdout, process.stderr)) if source
                ]
        for source, target, task in readers:
            self._labels.append(threading.Thread(target=self._label, args=(source, target, task), daemon=True))
        for thread in self._labels:
            thread.start()
        if feeds:
            threading.Thread(target=_feed, args=(feeds,), daemon=True).start()

    def wait(self) -> int:
        """Wait for the tasks; return the highest of their exit codes, 128 + its number for a signal."""
        interrupted = 0.0
        while len(self._codes) < len(self._hosts):
            arrived = signal.sigtimedwait(_SIGNALS, max(0.0, min(1.0, self._kill_at - time.monotonic())))
            signum = arrived.si_signo if arrived else 0
            if signum in _FORWARDED:
                self._signal(signum)
            elif signum in _ENDING or (signum == signal.SIGINT and time.monotonic() - interrupted < 1.0):
                _say("srun: forcing job termination")
                self._signal(signal.SIGKILL)
            elif signum == signal.SIGINT:
                interrupted = time.monotonic()
                _say("srun: interrupt (one more within 1 sec to abort)")
            if time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
            for task, process in self._tasks.items():
                if task not in self._codes and process.poll() is not None:
                    self._ended(task, process.returncode)
        for thread in self._labels:
            thread.join(5.0)
        return max(self._codes.values())

    def _ended(self, task: int, code: int) -> None:
        if code:
            how = f"Exited with exit code {code}" if code > 0 else str(signal.strsignal(-code)).partition(" (")[0]
            _say(f"srun: error: {self._hosts[task]}: task {task}: {how}")
        is_first = not self._codes
        self._codes[task] = code if code >= 0 else 128 - code
        wait_s = int(self._given.get("wait") or os.environ.get("SLURM_WAIT") or 0)
        kills = self._option("kill_on_bad_exit", "SLURM_KILL_BAD_EXIT", flag="1") not in {"", "0"}
        if code and kills and self._kill_at == float("inf"):
            _say(f"srun: launch/slurm: _step_signal: Terminating StepId={self._job['job_id']}.{self._number}")
            self._signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + KILL_WAIT_S
        elif is_first and wait_s:
            self._kill_at = time.monotonic() + wait_s

    def _signal(self, signum: int) -> None:
        """Signal the tasks alone, as Slurm does; kill all that they have started."""
        for task, process in self._tasks.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if signum == signal.SIGKILL:
                    os.killpg(process.pid, signum)
                elif task not in self._codes:
                    os.kill(process.pid, signum)

    def _option(self, name: str, variable: str, flag: str = "") -> str:
        return (self._given[name] or flag) if name in self._given else os.environ.get(variable, "")

    def _directory(self, host: str) -> str:
        wanted = self._given.get("chdir") or "."
        if Path(wanted).is_dir():
            return wanted
        _say(
            f"slurmstepd-{host}: error: couldn't chdir to `{wanted}': No such file or directory: going to /tmp instead"
        )
        return "/tmp"  # noqa: S108  as Slurm does

    def _environment(self, node: int, local: int, task: int) -> dict[str, str]:
        layout = self._layout
        variables = {
            "SLURM_PROCID": task,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
            "SLURM_GTIDS": ",".join(map(str, layout.tasks[node])),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), layout.num_tasks),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), len(layout.nodes)),
            **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), layout.counts),
            **dict.fromkeys(("SLURM_STEP_ID", "SLURM_STEPID"), self._number),
            "SLURM_STEP_NODELIST": compress(layout.nodes),
            "SLURM_DISTRIBUTION": self._given.get("distribution") or "block",
            **dict.fromkeys(("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"), "127.0.0.1"),
            "SLURMD_NODENAME": layout.nodes[node],
            "SLURM_UMASK": f"{_umask():04o}",
        }
        for option in ("cpus_per_task", "ntasks_per_node", "job_name"):
            if value := self._option(option, f"SRUN_{option.upper()}"):
                variables[f"SLURM_{option.upper()}"] = value
        if "label" in self._given:
            variables["SLURM_LABELIO"] = "1"
        return (
            exported(self._option("export", "SLURM_EXPORT_ENV"), os.environ)
            | {name: str(value) for name, value in variables.items()}
            | self._gpus(node, local)
        )

    def _gpus(self, node: int, local: int) -> dict[str, str]:
        """Return the GPUs of a task: those of its node, or its share of them."""
        nodes = expand(os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1")
        gpus = (self._job["gpus"] or [[]] * len(nodes))[nodes.index(self._layout.nodes[node])]
        share = self._option("gpus_per_task", "SLURM_GPUS_PER_TASK").rpartition(":")[2]
        if share.isdigit() and "none" not in self._given.get("gpu_bind", ""):
            gpus = gpus[local * int(share) : (local + 1) * int(share)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    def _input(self, task: int) -> int | IO[bytes]:
        wanted = self._given.get("input", "all")
        if wanted == "all" or wanted == str(task):
            return subprocess.DEVNULL if _is_null(0) else subprocess.PIPE
        if wanted == "none" or wanted.isdigit():
            return subprocess.DEVNULL
        return open(wanted, "rb")

    def _output(self, stream: str, task: int, node: int, host: str) -> int | IO[bytes] | None:
        """Return where a task writes; None: where srun does."""
        wanted = self._given.get(stream) or ("" if stream == "output" else self._given.get("output", ""))
        if wanted in {"", "all"} or wanted == str(task):
            return None
        if wanted == "none" or wanted.isdigit():
            return subprocess.DEVNULL
        job_id, name = str(self._job["job_id"]), os.environ.get("SLURM_JOB_NAME", "")
        values = {"j": job_id, "J": f"{job_id}.{self._number}", "s": str(self._number), "t": str(task), "n": str(node)}
        path = fill_in(wanted, values | {"N": host, "x": self._given.get("job_name") or name})
        if path not in self._files:
            self._files[path] = open(path, "ab" if self._given.get("open_mode") == "append" else "wb")  # noqa: SIM115
            if self._given.get("open_mode") != "append":
                flags = fcntl.fcntl(self._files[path], fcntl.F_GETFL)
                fcntl.fcntl(self._files[path], fcntl.F_SETFL, flags | os.O_APPEND)
        return self._files[path]

    def _label(self, source: IO[bytes], target: int, task: int) -> None:
        width = len(str(self._layout.num_tasks - 1))
        for line in source:
            os.write(target, b"%*d: %s" % (width, task, line if line.endswith(b"\n") else line + b"\n"))


def exported(export: str, environ: Mapping[str, str], always: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a job or a task gets by --export."""
    words = [word for word in export.split(",") if word]
    kept = {
        name: value
        for name, value in environ.items()
        if not words or {"ALL", name} & {*words, *always} or name.startswith(("SLURM_", "CLUSTERDDP_"))
    }
    return kept | {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def fill_in(pattern: str, values: Mapping[str, str]) -> str:
    """Fill in the name of an output file as Slurm does; a number between % and the letter pads it with zeros."""
    known = {"u": getpass.getuser(), "%": "%"} | dict(values)
    if "\\" in pattern:
        return pattern.replace("\\", "")

    def value(match: re.Match[str]) -> str:
        text = known.get(match[2], match[0])
        return text.zfill(min(10, int(match[1] or 0))) if text.isdigit() else text

    return re.sub("%([0-9]*)([A-Za-z%])", value, pattern)


def _become_task() -> None:
    """In the child: lead a process group, have no signal blocked or ignored, and die with srun."""
    os.setpgid(0, 0)
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent()


def _feed(feeds: list[IO[bytes]]) -> None:
    """Copy standard input to all tasks."""
    while data := os.read(0, 1 << 16):
        for feed in list(feeds):
            try:
                feed.write(data)
                feed.flush()
            except OSError:
                feeds.remove(feed)
    for feed in feeds:
        with contextlib.suppress(OSError):
            feed.close()


def _is_null(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def scontrol(words: Sequence[str], job: Mapping[str, Any]) -> int:
    """Answer what a script asks about its hosts and its job; change nothing."""
    asked = [word for word in words if not word.startswith("-")]
    verb, what, *values = [*asked, "", ""][: max(2, len(asked))]
    listed = values[0] if values else os.environ.get("SLURM_JOB_NODELIST", "")
    if verb == "show" and what.startswith("hostname"):
        print("\n".join(expand(listed)))
    elif verb == "show" and what.startswith("hostlist"):
        hosts = expand(listed)
        print(compress(sorted(hosts, key=_by_number) if what == "hostlistsorted" else hosts))
    elif verb == "show" and what.startswith("job"):
        number = what.partition("=")[2] or (values[0] if values else str(job["job_id"]))
        if number != str(job["job_id"]):
            print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
            return 1
        state = {"JobState": "CANCELLED"} if Path(job["cancel_file"]).exists() else {}
        lines = [f"{name}={value}" for name, value in (job["shown"] | state).items()]
        print(" ".join(lines) if {"-o", "--oneliner"} & set(words) else "\n   ".join(lines) + "\n")
    elif verb in {"requeue", "requeuehold", "update", "hold", "release", "suspend", "resume", "top", "notify"}:
        _say(f"clusterddp: without Slurm nothing is changed: scontrol {' '.join(words)}")
    else:
        _say(f"clusterddp: scontrol {' '.join(words)}: this script runs without Slurm (--launcher local)")
        return 1
    return 0


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split("([0-9]+)", name)]


def sbatch(words: Sequence[str], job: Mapping[str, Any], job_file: str) -> int:
    """Say what would be queued; the script gets a number that no job has."""
    options, rest = take_options([Word(word) for word in words], SBATCH)
    names = {option.name for option in options}
    what = " ".join(words) if rest or "wrap" in names else "a script on its standard input"
    _say(f"clusterddp: without Slurm nothing is queued: sbatch {what}")
    number = int(job["job_id"]) + 1 + next_number(f"{job_file}.jobs")
    if "test_only" not in names:
        print(number if "parsable" in names else f"Submitted batch job {number}")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
