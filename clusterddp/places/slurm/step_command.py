"""What stands in front of srun, torchrun and the like in the PATH of a batch script, and puts our task between.

    srun OPTIONS python train.py  ->  srun OPTIONS PYTHON ... step_task srun RUN_DIR ATTEMPT STEP -- python train.py

The shell has read the script, so the arguments are what the launcher would get. The real launcher is the next one of
its name in PATH. What starts no ranks, and what we cannot read for sure, runs unchanged; so does everything when
something of ours fails. Launchers that are Python (torchrun, accelerate, deepspeed) run in step_launcher.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterddp.run.directory import RunDir
    from clusterddp.run.steps import StepRecord
    from clusterddp.spec.launch_options import Word

_THIS = "clusterddp.places.slurm.step_command"
PYTHON_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
LAUNCHERS = ("srun", "mpirun", "mpiexec", *PYTHON_LAUNCHERS)
COMMANDS = (*LAUNCHERS, "scontrol")
STAND_INS = "stand_ins"
"""Beside our commands where there is no Slurm: what stands in for its own (places/local/stand_ins.py)."""
LINE = "CLUSTERDDP_LINE"
"""The line of the script, from a function of bash to the command that it runs."""
WAITED = "CLUSTERDDP_WAITED"
"""Set where a function of bash waits for the command in a subshell; `1`: the command is one in the background."""
_PR_SET_PDEATHSIG = 1
ASK = "--ask"
"""In place of a command's name: step_launcher.py asks for the words of our task."""
_MEETING_TIMEOUT_S = 60.0
_WRAPPER = Path(__file__).with_name("step_launcher.py")
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed"})
_MODULES_OF_LAUNCHERS = _MODULES | {"accelerate.commands.accelerate_cli", "deepspeed.launcher.runner"}
_NO_TASKS = frozenset({"help", "usage", "version", "test_only", "V", "h"})
_UNREADABLE = frozenset({"multi_prog", "pty", "bcast", "no_allocate", "interactive", "argv", "autocomplete"})
"""Options of srun with which the words behind them are no program for each task."""
_CONTAINERS = frozenset({"container", "container_image", "container_name"})
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?d?")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh"})
_NAMED = re.compile(
    r"(?:^|[\s/;&|('\"`=])(?:(?:python|pypy)[0-9.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec)(?=$|[\s;&|)'\"`])"
    r"|[^\s;&|('\"`]\.(?:py|sh|bash)(?=$|[\s;&|)'\"`])"
)
"""Python, a launcher or a script in the text of a shell."""
_WRAPPERS = re.compile(
    "env|numactl|nsys|ncu|time|timeout|nice|ionice|taskset|stdbuf|nohup|catchsegv|gdb|cuda-gdb|valgrind|strace|perf|"
    "rocprof(v3)?|dlprof|tau_exec|scorep|likwid-pin|hwloc-bind|chrt|setsid|xvfb-run|apptainer|singularity|shifter|"
    "podman(-hpc)?|docker|ch-run|enroot|sarus|conda|mamba|micromamba|uvx?|poetry|pixi|pdm|pipenv|hatch|rye|coverage|"
    "memray|py-spy|scalene"
)
_SYSTEM = ("/bin/", "/usr/bin/", "/sbin/", "/usr/sbin/")
_SHIM = """#!/bin/bash -p
'''exec' /bin/bash -pc '
name=$1 job=$2 python=$3; shift 3
if [ "${{SLURM_JOB_ID-}}" = "$job" ] && [ -x "$python" ]; then exec "$python" "$@"; fi
until [ "$1" = : ]; do shift; done; shift; IFS=:
for folder in $PATH; do
    case $folder in */launcher/bin) ;; *) if [ -x "$folder/$name" ]; then exec "$folder/$name" "$@"; fi ;; esac
done
echo "$name: command not found" >&2; exit 127' bash {words} : "$@"
'''
import runpy, sys
sys.argv[:1] = {python_words}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The bash part runs our Python in the job of the script, the next command of the name elsewhere: in another job, which
has inherited PATH, or where our Python is not. Debian's sh would lose exported functions; with -p, bash does not read
BASH_ENV. The Python part is for `python $(which torchrun)`."""


def install_commands(run: RunDir, attempt: int, environ: Mapping[str, str], *, original: str) -> dict[str, str]:
    """Write the commands that the script of this start of the job finds first; return the environment of the script.

    `original` is the path of the script as submitted, which our `scontrol show job` names.
    Raises: OSError: the run's directory cannot be written.
    """
    import shlex

    from clusterddp.system.files import write_bytes, write_text
    from clusterddp.system.python import isolated_command
    from clusterddp.system.templates import read_template

    job = environ.get("SLURM_JOB_ID", "")
    run.commands.mkdir(mode=0o700, exist_ok=True)
    for name in COMMANDS:
        facts = (str(run.path), str(attempt), *((original,) if name == "scontrol" else ()))
        words = shlex.join((name, job, *isolated_command(_THIS, name, *facts)))
        python_words = [str(_WRAPPER), _wrapper_facts(run, attempt, name), name]
        path = run.commands / name
        write_bytes(path, os.fsencode(_SHIM.format(words=words, python_words=ascii(python_words))))
        path.chmod(0o700)
    outer = environ.get("CLUSTERDDP_SCRIPT_RUN")  # the job was submitted by another script
    user_file = environ.get("CLUSTERDDP_BASH_ENV") if outer else environ.get("BASH_ENV")
    bin_folder = shlex.quote(str(run.commands))
    functions = "".join(_FUNCTION.format(name=name) for name in LAUNCHERS)
    front = shlex.quote(":".join(map(str, (run.commands, *run.launcher_dir.glob(STAND_INS)))))
    text = read_template("batch_script_env.sh").replace("{bin}", bin_folder).replace("{front}", front)
    text = text.replace("{functions}", functions)
    text = text.replace("{user}", _USER_FILE.format(value=user_file) if user_file else "")
    text = text.replace("{script}", shlex.quote(str(run.batch_script)))
    bash_env = run.launcher_dir / "bash_env"
    write_text(bash_env, text)
    path_behind = [folder for folder in environ.get("PATH", os.defpath).split(":") if not _is_ours(folder)]
    return {
        **environ,
        "PATH": ":".join((str(run.commands), *path_behind)),
        "BASH_ENV": str(bash_env),
        "CLUSTERDDP_BASH_ENV": user_file or "",
        "CLUSTERDDP_SCRIPT_RUN": str(run.path),
        "CLUSTERDDP_SCRIPT_ATTEMPT": str(attempt),
    }


_FUNCTION = """    if ! declare -F {name} >/dev/null; then
        {name}() {{ {{ local clusterddp_x=$-; set +x; }} 2>/dev/null; clusterddp_run {name} "$@" || return $?; }}
    fi
"""
_USER_FILE = """clusterddp_x="{value}"
if [ -r "$clusterddp_x" ]; then . "$clusterddp_x"; fi
"""
"""The shell expands variables in BASH_ENV."""


def launcher_argv(program: Sequence[str], run: RunDir, attempt: int) -> list[str] | None:
    """Return the command in which a launcher that is Python starts its ranks by our task; None: it is no such launcher.

    `run` is the run as the step sees it whose task is to become this program. The step's ranks are then the launcher's,
    if it has one agent in each task of the step.
    """
    name = Path(program[0]).name
    if name in PYTHON_LAUNCHERS:
        real = (
            _find_behind(program[0]) if _is_ours(str(Path(program[0]).parent)) or "/" not in program[0] else program[0]
        )
        python = _shebang_python(real) if real else None
        return [*python, *_wrapped(run, attempt, name), str(real), *program[1:]] if python else None
    if not _PYTHON.fullmatch(name):
        return None
    split = _split_python(program)
    if split is None:
        return None
    flags, target, rest = split
    if target[0] == "-m":
        known = target[1] in _MODULES_OF_LAUNCHERS
        name = next((name for name in PYTHON_LAUNCHERS if target[1].startswith(name)), "torchrun")
    else:
        name = Path(target[0]).name
        known = name in PYTHON_LAUNCHERS
        if known and _is_ours(str(Path(target[0]).parent)):
            target = [_find_behind(name) or target[0]]
    return [program[0], *flags, *_wrapped(run, attempt, name), *target, *rest] if known else None


def main() -> None:
    """Become the real command: `NAME RUN_DIR ATTEMPT [ORIGINAL] : ARGUMENTS`, or answer step_launcher.py."""
    end = sys.argv.index(":")
    (name, run_dir, attempt, *facts), arguments = sys.argv[1:end], sys.argv[end + 1 :]
    if name == ASK:
        _answer(run_dir, int(attempt), *facts)
        return
    line, waited = os.environ.pop(LINE, ""), os.environ.pop(WAITED, "")
    real = _find_behind(name)
    if real is None:
        sys.stderr.write(f"{name}: command not found\n")
        sys.exit(127)
    command = [real, *arguments]
    try:
        from clusterddp.run.directory import RunDir

        run = RunDir(Path(run_dir))
        if name == "scontrol":
            _run_scontrol(real, arguments, run, *facts)
        elif name in PYTHON_LAUNCHERS:
            python = _shebang_python(real)
            os.environ[LINE] = line
            command = [*python, *_wrapped(run, int(attempt), name), real, *arguments] if python else command
        else:
            command = _with_task(run, int(attempt), name, command, int(line) if line else None)
    except Exception as error:  # whatever it is, the script gets what it has asked for
        sys.stderr.write(f"clusterddp: {name} runs unchanged: {type(error).__name__}: {error}\n")
    _restore_signals(waited)
    os.execv(command[0], [name, *command[1:]] if command[0] == real else command)


def _with_task(run: RunDir, attempt: int, name: str, command: list[str], line: int | None) -> list[str]:
    """Return the command of srun or mpirun with our task between; the command as it is, if it starts no ranks."""
    from clusterddp.errors import UsageError
    from clusterddp.run.record import log_event
    from clusterddp.run.steps import new_step
    from clusterddp.spec.launch_options import MPIRUN, SRUN, Word, take_options

    try:
        words = [Word(word) for word in command[1:]]
        options, rest = take_options(words, SRUN if name == "srun" else MPIRUN)
    except UsageError as error:
        log_event(run, "command_not_watched", attempt=attempt, command=name, line=line, reason=error.message)
        return command
    head, program = command[: len(command) - len(rest)], [word.text for word in rest]
    names = {option.name for option in options}
    if not program or names & _NO_TASKS or not _starts_ranks(program):
        return command
    reason = _reason_against(names, {option.name: option.value for option in options if option.value}, program)
    if reason:
        log_event(run, "command_not_watched", attempt=attempt, command=name, line=line, reason=reason)
        return command
    step = new_step(run, attempt, _record([name, *head[1:]], program, line))
    task = _task(step, attempt, name)
    if name == "srun" and "chdir" not in names and "/" in program[0] and os.access(program[0], os.X_OK):
        program[0] = os.path.join(Path.cwd(), program[0])
    if names & _CONTAINERS:
        task = [*_where_we_are(run), *task]
    return [*head, *task, *program]


def _reason_against(names: set[str], values: Mapping[str, Word], program: Sequence[str]) -> str | None:
    """Say why a command that starts ranks cannot get our task; None: it can."""
    if odd := sorted(names & _UNREADABLE):
        return f"--{odd[0].replace('_', '-')}"
    if ":" in program:
        return "it starts several programs, with `:` between them"
    if "clusterddp.places.slurm.step_task" in program:
        return "the launcher has called another one, whose tasks are watched"
    job = values.get("jobid")
    return f"--jobid={job.text} is another job" if job and job.text != os.environ.get("SLURM_JOB_ID") else None


def _task(step: RunDir, attempt: int, name: str) -> list[str]:
    from clusterddp.system.python import isolated_command

    facts = (name, str(step.path), str(attempt), str(step.step), "--")
    return list(isolated_command("clusterddp.places.slurm.step_task", *facts))


def _where_we_are(run: RunDir) -> list[str]:
    """Return words in front of a task that become the program where our Python is not, as in a container."""
    import shlex

    import clusterddp

    tests = (
        f"-x {shlex.quote(sys.executable)}",
        *(f"-d {shlex.quote(str(each))}" for each in (Path(clusterddp.__file__).parent, run.path)),
    )
    here = " && ".join(f"[ {test} ]" for test in tests)
    return ["/bin/sh", "-c", f'{here} && exec "$@"; until [ "$1" = -- ]; do shift; done; shift; exec "$@"', "sh"]


def _starts_ranks(program: Sequence[str]) -> bool:
    """Return whether a program is Python, a launcher or a script, or a wrapper around one."""
    name = Path(program[0]).name
    if _PYTHON.fullmatch(name):
        return program[1:] not in (["-V"], ["--version"])
    if name in _SHELLS:
        texts = [program[at + 1] for at, word in enumerate(program[:-1]) if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word)]
        return not texts or bool(_NAMED.search(texts[0]))
    if name in LAUNCHERS or name.endswith((".py", ".sh", ".bash")):
        return True
    if _WRAPPERS.fullmatch(name):
        return any(_NAMED.search(word) for word in program[1:])
    path = program[0] if "/" in program[0] else _find_behind(name)
    first = _first_line(path) if path else ""
    # Many a small tool of the system is a script of sh.
    return first.startswith("#!") and (not str(path).startswith(_SYSTEM) or "python" in first)


def _record(command: Sequence[str], program: Sequence[str], line: int | None) -> StepRecord:
    import time

    from clusterddp.run.steps import StepRecord

    return StepRecord(
        command=_hide(command),
        program=_hide(program),
        line=line,
        working_dir=os.getcwd(),  # noqa: PTH109
        environment=_changed_variables(),
        started=time.time(),
        inside=os.environ.get("CLUSTERDDP_STEP"),
    )


def _hide(words: Sequence[str]) -> tuple[str, ...]:
    from clusterddp.spec.secret_values import hide_secret_arguments

    hidden: list[str] = hide_secret_arguments({"args": list(words)})["args"]
    texts = zip(words, hidden, strict=True)
    return tuple(hide_secret_arguments({"command": new})["command"] if new == old else new for old, new in texts)


def _changed_variables() -> dict[str, str]:
    """Return the variables that the script has set, without secrets and without what is ours or the shell's.

    Of a list that the script has extended, such as PATH, the value at the start is `$PATH`.
    """
    from clusterddp.spec.secret_values import is_secret

    try:
        with open(f"/proc/{os.environ['CLUSTERDDP_SCRIPT_PID']}/environ", "rb") as file:
            at_start = dict(pair.partition("=")[::2] for pair in os.fsdecode(file.read()).split("\0") if pair)
    except (KeyError, OSError):
        return {}  # a task on another node
    if at_start.get("SLURM_JOB_ID") != os.environ.get("SLURM_JOB_ID"):
        return {}
    ours = ("/launcher/bin", f"/launcher/{STAND_INS}")
    at_start, now = (
        {**each, "PATH": ":".join(path for path in each.get("PATH", "").split(":") if not path.endswith(ours))}
        for each in (at_start, os.environ)
    )
    return {
        name: f":{value}:".replace(f":{before}:", f":${name}:", 1)[1:-1] if (before := at_start.get(name)) else value
        for name, value in now.items()
        if at_start.get(name) != value
        and not name.startswith(("CLUSTERDDP_", "BASH_FUNC_"))
        and name not in {"BASH_ENV", "SHLVL", "_", "OLDPWD", "PWD"}
        and not is_secret(name, value)
    }


def _wrapped(run: RunDir, attempt: int, name: str) -> list[str]:
    """Return the words behind Python and its flags that run a launcher in step_launcher.py."""
    return [str(_WRAPPER), _wrapper_facts(run, attempt, name)]


def _wrapper_facts(run: RunDir, attempt: int, name: str) -> str:
    import json

    from clusterddp.system.python import isolated_command

    ask = isolated_command(_THIS, ASK, str(run.path), str(attempt), name, run.step or "", ":")
    return json.dumps({"name": name, "ask": ask, "bin": str(run.commands)})


def _answer(run_dir: str, attempt: int, name: str, given_step: str) -> None:
    """Print the words that a launcher has to put in front of its program, as JSON.

    Standard input has what the launcher runs, and its rendezvous: agents on several nodes with the same one make one
    step, the first of them its record.
    """
    import json

    from clusterddp.run.directory import RunDir
    from clusterddp.run.steps import new_step

    asked = json.load(sys.stdin)
    run, line = RunDir(Path(run_dir)), os.environ.get(LINE)
    record = _record([name, *asked["command"]], asked["program"], int(line) if line else None)
    num_agents, num_tasks = asked["num_agents"], os.environ.get("SLURM_STEP_NUM_TASKS")
    if given_step and str(num_agents) == num_tasks:
        step = RunDir(run.path, step=given_step)
    elif num_agents > 1:
        step = _shared_step(run, attempt, record, asked["rendezvous"])
    else:
        step = new_step(run, attempt, record)
    print(json.dumps(_task(step, attempt, name)))


def _shared_step(run: RunDir, attempt: int, record: StepRecord, rendezvous: str) -> RunDir:
    """Return the step of all agents that meet at a rendezvous: the first one makes it, the others wait for it.

    Raises: OSError: the first one has not made it within a minute.
    """
    import hashlib
    import itertools
    import time

    from clusterddp.run.directory import RunDir
    from clusterddp.run.steps import new_step
    from clusterddp.system.files import write_text

    folder = run.attempt(attempt).steps
    folder.mkdir(mode=0o700, exist_ok=True)
    key = f"agents-{hashlib.sha256(rendezvous.encode()).hexdigest()[:16]}"
    agent = f"{os.environ.get('SLURMD_NODENAME') or os.uname().nodename}-{os.environ.get('SLURM_PROCID', '0')}"
    number = next(n for n in itertools.count() if write_text(folder / f"{key}-{n}-{agent}", "", exclusive=True))
    meeting = folder / f"{key}-{number}"
    if write_text(folder / f"{key}-{number}.first", agent, exclusive=True):
        step = new_step(run, attempt, record)
        write_text(meeting, str(step.step))
        return step
    deadline = time.monotonic() + _MEETING_TIMEOUT_S
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first agent of {rendezvous} has made no step")
        time.sleep(0.1)
    return RunDir(run.path, step=meeting.read_text())


def _run_scontrol(real: str, arguments: Sequence[str], run: RunDir, original: str) -> None:
    """Print what `scontrol show` prints, with the path of the script as submitted; return for all else."""
    if not any(word and "show".startswith(word) for word in arguments):
        return
    import subprocess

    done = subprocess.run([real, *arguments], stdout=subprocess.PIPE, check=False)
    ours = os.fsencode(run.launcher_dir / "sbatch" / Path(original).name)
    text = done.stdout.replace(ours + b" " + os.fsencode(run.path), ours).replace(ours, os.fsencode(original))
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
    os._exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def _split_python(program: Sequence[str]) -> tuple[list[str], list[str], list[str]] | None:
    """Split the arguments of Python: its flags, `-m MODULE` or `SCRIPT`, the rest; None: another way to run it."""
    at = 1
    while at < len(program):
        word = program[at]
        if not word.startswith("-") or word == "-":
            return list(program[1:at]), [word], list(program[at + 1 :])
        if word.startswith("--"):
            return None
        found = re.fullmatch(r"-([a-zA-Z]*?)([mcWX])(.*)", word, re.S)
        if found and found[2] == "c":
            return None
        if found and found[2] == "m":
            flags = [*program[1:at], *([f"-{found[1]}"] if found[1] else [])]
            words = [found[3], *program[at + 1 :]] if found[3] else list(program[at + 1 :])
            return (flags, ["-m", words[0]], words[1:]) if words else None
        at += 2 if found and not found[3] else 1
    return None


def _shebang_python(path: str) -> list[str] | None:
    """Return the Python of a script, with its flags, as its first line says it; None: it is no script of Python."""
    import shlex

    first, second = [*_first_line(path, 2).split("\n"), ""][:2]
    words = first[2:].split() if first.startswith("#!") else []
    if words and words[0].endswith("/sh") and second.startswith("'''exec' "):  # pip's form of a long path
        words = shlex.split(second[len("'''exec' ") :])[:-2] if second.rstrip().endswith('"$@"') else []
    if words and Path(words[0]).name == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
        found = _find_behind(words[0]) if words else None
        words = [found, *words[1:]] if found else []
    return words if words and _PYTHON.fullmatch(Path(words[0]).name) else None


def _first_line(path: str, lines: int = 1) -> str:
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return ""
    return "\n".join(os.fsdecode(head).split("\n")[:lines]) if head.startswith(b"#!") else ""


def _find_behind(name: str) -> str | None:
    """Find a command in PATH, without those of batch scripts."""
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        path = f"{folder or '.'}/{Path(name).name}"
        if not _is_ours(folder) and os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113
            return path
    return None


def _is_ours(folder: str) -> bool:
    return folder.rstrip("/").endswith("/launcher/bin")


def _restore_signals(waited: str) -> None:
    """Undo what Python ignores, and bash for a command in the background; end with the shell that waits."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if waited:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN if waited == "1" else signal.SIG_DFL)


if __name__ == "__main__":
    main()
