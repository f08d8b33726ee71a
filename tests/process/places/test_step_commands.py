"""The commands in front of a batch script's PATH, under real bash and by real torchrun.

srun and mpirun are fakes here: they write down what they get and run the command once; tests/rack has real Slurm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.places.slurm.step_command import _wrapper_facts, install_commands, launcher_argv
from clusterddp.run.directory import RunDir
from clusterddp.run.steps import StepRecord, read_step, steps_of

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")

LAUNCHER = """#!/bin/bash
# A fake launcher: it writes down its arguments, and runs the command behind its options.
printf '%s\\n' "$(basename "$0")" "$@" >>"$ARGV_FILE"
echo "---" >>"$ARGV_FILE"
while [[ ${1-} == -* ]]; do
    case $1 in -n | -N | -w) shift 2 ;; --) shift; break ;; *) shift ;; esac
done
# It becomes the user's program, as our task does.
for ((i = 1; i <= $#; i++)); do
    if [ "${!i}" = clusterddp.places.slurm.step_task ]; then shift $((i + 5)); break; fi
done
if [ $# = 0 ]; then exit 0; fi
exec "$@"
"""


class Job:
    """A job whose script runs with our commands, or without them."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = RunDir(tmp_path / "runs of ünt's" / "a run")
        (self.run.path / "attempts" / "1").mkdir(parents=True)
        self.run.launcher_dir.mkdir()
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        self.argv_file = tmp_path / "argv"
        for name in ("srun", "mpirun"):
            self.add_command(name, LAUNCHER)
        self.add_command("trained.py", "#!/bin/sh\necho trained $*\n")
        self.add_command(
            "trap.py",
            f"#!{sys.executable}\nimport signal as s\nprint(s.getsignal(2), s.getsignal(3))\n",
        )
        self.environ = {
            "PATH": f"{self.bin}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "ARGV_FILE": str(self.argv_file),
            "OMP_NUM_THREADS": "1",
        }

    def add_command(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def environment(self, original: str = "/home/ana/train.slurm") -> dict[str, str]:
        environment = install_commands(self.run, 1, self.environ, original=original)
        return environment | {"CLUSTERDDP_SCRIPT_PID": str(os.getpid())}

    def bash(
        self, text: str, *, ours: bool = True, shell: tuple[str, ...] = ("bash",), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        script = self.run.batch_script
        script.write_text(text)
        self.argv_file.unlink(missing_ok=True)
        environment = (self.environment() if ours else self.environ) | variables
        command = [*shell, str(script), "one", "two words"]
        return subprocess.run(
            command, env=environment, cwd=self.bin, capture_output=True, text=True, timeout=60, check=False
        )

    def both(self, text: str, shell: tuple[str, ...] = ("bash",)) -> subprocess.CompletedProcess[str]:
        """Run a script without and with our commands; demand the same result and output; return the latter."""
        plain = self.bash(text, ours=False, shell=shell)
        ours = self.bash(text, shell=shell)
        assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours.stderr
        assert sorted(ours.stderr.splitlines()) == sorted(plain.stderr.splitlines())
        return ours

    def records(self) -> list[StepRecord]:
        records = [read_step(step.attempt(1)) for step in steps_of(self.run, 1)]
        return [record for record in records if record is not None]

    def calls(self) -> list[list[str]]:
        return [call.split("\n")[:-1] for call in self.argv_file.read_text().split("---\n")[:-1]]

    def events(self) -> list[dict[str, object]]:
        lines = self.run.events.read_text().splitlines() if self.run.events.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


SAME = {
    "plain": "srun -n 2 python -c 'print(1)' x 'y z'\necho $?",
    "exit code": "srun -n2 python -c 'raise SystemExit(7)'\necho $?\nexit 5",
    "set -e": "set -e\nsrun python -c 'raise SystemExit(7)'\necho not reached",
    "set -e in a function": "set -e\nf() { srun python -c 'raise SystemExit(7)'; echo no; }\nf\necho not reached",
    "ERR trap": "trap 'echo ERR $LINENO' ERR\nsrun python -c 'raise SystemExit(7)'\necho on",
    "ERR and set -e": "set -e\ntrap 'echo ERR $LINENO' ERR\nsrun python -c 'raise SystemExit(7)'\necho on",
    "errtrace": "set -eE\ntrap 'echo ERR $LINENO' ERR\nf() { srun python -c 'raise SystemExit(7)'; }\nf",
    "EXIT trap": "set -e\ntrap 'echo EXIT $?' EXIT\nsrun python -c 'raise SystemExit(7)'",
    "set -u": "set -u\nsrun python -c 'print(1)'\nsrun python -c 'print(2)' | cat\n(srun python -c 'print(3)')",
    "pipefail": "set -o pipefail\nsrun python -c 'print(1); raise SystemExit(3)' | cat\necho $? ${PIPESTATUS[*]}",
    "PIPESTATUS": "srun python -c 'raise SystemExit(3)' | cat | false\necho ${PIPESTATUS[*]}",
    "SIGPIPE": "srun python -c 'while True: print(1)' 2>/dev/null | head -n 1\necho ${PIPESTATUS[*]}",
    "SIGPIPE of a shell": "srun bash -c 'yes trained.py' | head -n 1\necho ${PIPESTATUS[*]}",
    "if": "if srun python -c 'raise SystemExit(1)'; then echo yes; else echo no; fi",
    "or": "srun python -c 'raise SystemExit(1)' || exit 3",
    "not": "! srun python -c 'raise SystemExit(1)'\necho $?",
    "subshell": "(cd /; srun python -c 'import os; print(os.getcwd())'; srun python -c 'print(2)')\necho $?",
    "group": "{ srun python -c 'print(1)'; srun python -c 'print(2)'; } &\nwait $!\necho $?",
    "a function in the background": "f() { srun python -c 'print(1)'; echo after; return 4; }\nf & wait $!\necho $?",
    "a loop in a pipe": 'for i in 1 2 3; do srun python -c "print($i)"; done | cat',
    "a loop that reads": "printf 'a\\nb\\n' | while read x; do srun python -c \"print('$x')\" </dev/null; done",
    "own function": 'srun() { echo mine "$@"; }\nsrun python a.py',
    "own function by keyword": "function srun { echo mine; command srun \"$@\"; }\nsrun python -c 'print(1)'",
    "command": "command srun python -c 'print(1)'",
    "exec": "exec srun python -c 'print(1); raise SystemExit(4)'",
    "env": "env A=b srun python -c 'import os; print(os.environ[\"A\"])'",
    "timeout": "timeout 60 srun python -c 'print(1)'",
    "xargs": "echo 1 2 | xargs -n1 srun trained.py",
    "bash -c": "bash -c 'srun trained.py a; exit 6'; echo $?",
    "bash -c, last": "bash -c 'srun python -c \"raise SystemExit(6)\"'; echo $?",
    "sh -c": "sh -c 'srun trained.py a'; echo $?",
    "unset -f": "unset -f srun 2>/dev/null; srun trained.py 1",
    "a variable": "L='srun -n 2'\n$L trained.py a",
    "eval": 'CMD=\'srun trained.py "a b"\'\neval "$CMD"',
    "an array": "a=(srun -n 2 trained.py 'x  y' '')\n\"${a[@]}\"",
    "heredoc": "srun python - <<EOF a\nimport sys\nprint(sys.argv, $((1 + 2)))\nEOF",
    "here-string": "srun python - <<< 'print(5)'",
    "heredoc in the background": "srun python - <<EOF &\nprint(5)\nEOF\nwait $!",
    "standard input in the background": "echo x | { srun python -c 'print(input())' & wait $!; }\necho $?",
    "no standard input in the background": "srun python -c 'import sys; print(repr(sys.stdin.read()))' & wait",
    "a command substitution": "x=$(srun python -c 'print(1)')\necho \"<$x>\"",
    "a process substitution": "cat <(srun python -c 'print(1)')",
    "a variable for one command": "A=b srun python -c 'import os; print(os.environ[\"A\"])'\necho ${A-unset}",
    "time": "TIMEFORMAT=; time srun trained.py",
    "redirections": "srun python -c 'import sys; print(1); print(2, file=sys.stderr)' >out 2>&1\ncat out; rm out",
    "set -x": "set -x\nsrun trained.py a\nsrun trained.py b || true\nset +x\necho end",
    "set -x in a pipe": "set -x\nsrun trained.py a 2>&1 | cat\n: end",
    "IFS and noglob": "IFS=x; set -f\nsrun trained.py axb '*'",
    "arguments": 'srun trained.py "$@" "$#"',
    "signals ignored": "p() { srun python -c 'import signal as s; print(s.getsignal(2), s.getsignal(3))'; }\n"
    "srun python -c 'import signal as s; print(s.getsignal(2), s.getsignal(3))' & wait\n"
    "srun python -c 'import signal as s; print(s.getsignal(2), s.getsignal(3))' | cat\n"
    "bash -c 'srun trap.py' & wait\nbash -c 'srun trap.py'\np\np | cat\n(p)",
    "not there": "PATH=/usr/bin:/bin\nsrun_of_nobody x 2>/dev/null; echo $?",
    "no program": "srun -n 2; srun --version; srun -n 2 hostname >/dev/null; echo $?",
    "jobs of a subshell": "( sleep 60 & srun python -c 'print(1)'; kill $!; wait $! 2>/dev/null; echo $? )",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME.keys())
def test_a_script_does_the_same_as_without_us(job: Job, text: str) -> None:
    job.both(text)


SIGNALS = {
    "to a command in the background": (
        "trap 'kill -USR1 $PID' USR1\nsrun python -u SIGNALLED & PID=$!\nwaits() { while :; do wait $PID; s=$?; "
        "kill -0 $PID 2>/dev/null || break; done; }\n(READY; kill -USR1 $$) & waits\nwait $PID; echo $?"
    ),
    "that the command dies of": "srun python -u SLEEPING & PID=$!\nREADY; kill -TERM $PID\nwait $PID\necho $?",
    "kill -9": "srun python -u SLEEPING & PID=$!\nREADY; kill -KILL $PID\nwait $PID 2>/dev/null\necho $?",
    "in a subshell with a directory": (
        "(cd / && srun python -u SLEEPING) & PID=$!\nREADY; kill $PID\nwait $PID\necho $?"
    ),
    "to bash -c": "bash -c 'srun python -u SLEEPING' & PID=$!\nREADY; kill $PID\nwait $PID 2>/dev/null\necho $?",
    "a trap of the subshell": "( trap 'echo own' TERM; srun python -u SHORT; echo after ) & PID=$!\n"
    "READY; kill $PID\nwait $PID\necho $?",
}
PROGRAMS = {
    "SIGNALLED": "import signal, time\ndef end(*_):\n    print('got USR1'); time.sleep(.2); raise SystemExit(9)\n"
    "signal.signal(signal.SIGUSR1, end)\nprint('ready'); open('READY', 'w').close()\ntime.sleep(30)\n",
    "SLEEPING": "import time\nprint('ready'); open('READY', 'w').close()\ntime.sleep(30)\nprint('slept')\n",
    "SHORT": "import time\nprint('ready'); open('READY', 'w').close()\ntime.sleep(2)\nprint('slept')\n",
}


@pytest.mark.parametrize("text", SIGNALS.values(), ids=SIGNALS.keys())
def test_signals_of_a_script_reach_the_command(job: Job, tmp_path: Path, text: str) -> None:
    ready = str(tmp_path / "ready")
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name.lower()}.py").write_text(program.replace("READY", ready))
        text = text.replace(name, f"{tmp_path}/{name.lower()}.py")
    text = text.replace("READY;", f"until [ -e {ready} ]; do sleep 0.1; done;")
    job.both(f"rm -f {ready}\n{text}")


RANK = """import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "PYTHON_EXEC")
facts = [__name__, sys.argv[1:], os.path.basename(sys.argv[0]), sys.flags.interactive]
sys.stdout.write(repr([*facts, *(os.environ.get(name) for name in names)]) + "\\n")
if "fail" in sys.argv and os.environ["LOCAL_RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists(__file__ + ".printed"):  # torchrun ends the other rank at once
        pass
    raise SystemExit(7)
sys.stdout.flush()
open(__file__ + ".printed", "w").close()
"""
TORCHRUN = {
    "plain": "torchrun --nproc_per_node 2 RANK.py --lr 0.1 'a b'",
    "a module": "torchrun --nproc-per-node=2 -m rank_module x",
    "no python": "torchrun --nproc-per-node=2 --no-python ./rank.sh x '' '*'",
    "run path": "torchrun --nproc-per-node=2 --run-path RANK.py x",
    "standalone": "torchrun --standalone --nnodes 1:1 --max-restarts 1 --nproc_per_node 2 RANK.py fail",
    "restarts": "torchrun --nproc_per_node 2 --max-restarts=1 --monitor-interval 0.1 RANK.py fail",
    "tee": "torchrun --nproc_per_node 2 --tee 3 --redirects 3 --log-dir LOGS RANK.py",
    "variables": "PET_NPROC_PER_NODE=2 PET_ROLE=x torchrun RANK.py",
    "usage error": "torchrun --nproc_per_node",
    "another usage error": "torchrun --no-such-option RANK.py",
    "help": "torchrun --help",
    "by its path's Python": 'python "$(which torchrun)" --nproc_per_node 2 RANK.py',
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no RANK.py a 2>/dev/null",
    "accelerate's help": "accelerate launch --help",
}


@pytest.mark.parametrize("text", TORCHRUN.values(), ids=TORCHRUN.keys())
def test_ranks_of_torchrun_are_the_same_as_without_us(job: Job, tmp_path: Path, text: str) -> None:
    text = text.replace("RANK.py", f"{tmp_path}/rank_module.py").replace("LOGS", str(tmp_path / "logs"))
    (tmp_path / "rank_module.py").write_text(RANK)
    job.add_command("rank.sh", f'#!/bin/sh\nexec {sys.executable} {tmp_path}/rank_module.py "$@"\n')
    job.environ["PYTHONPATH"] = str(tmp_path)
    text = f"{text}\necho $?"
    plain = job.bash(text, ours=False)
    (tmp_path / "rank_module.py.printed").unlink(missing_ok=True)
    ours = job.bash(text)
    assert sorted(ours.stdout.splitlines()) == sorted(plain.stdout.splitlines()), ours.stderr
    # This run has no plan: each task of the step says so, and becomes the program.
    has_ranks = "__main__" in plain.stdout
    assert bool(job.records()) == has_ranks, ours.stderr
    assert ("step_not_watched" in {event["event"] for event in job.events()}) == has_ranks
    if "help" in text or "error" in plain.stderr:
        assert ours.stderr == plain.stderr


def test_a_step_has_its_command_and_its_line(job: Job) -> None:
    job.bash(
        "# a\n\ntrain() {\n    srun -n 2 python -c 'pass' --token=x \"$@\"\n}\n"
        "train 1\nsource ./part.sh || . /dev/stdin <<< 'srun python -c pass'\neval 'srun python -V; srun trained.py'\n"
        "exec srun -l bash -c 'python -c pass'\n"
    )
    records = job.records()
    assert [(record.command, record.program, record.line) for record in records] == [
        (("srun", "-n", "2"), ("python", "-c", "pass", "--token=(not shown)", "1"), 4),
        (("srun",), ("python", "-c", "pass"), 7),
        (("srun",), ("trained.py",), 8),
        (("srun", "-l"), ("bash", "-c", "python -c pass"), None),
    ]
    assert {record.working_dir for record in records} == {str(job.bin)}


def test_a_step_has_the_variables_that_the_script_has_set(job: Job) -> None:
    text = "export LR=0.1 HF_TOKEN=hf_0123456789abcdefghij\nexport PATH=/opt/x:$PATH\nWD=2 srun trained.py\n"
    job.run.batch_script.write_text(text)
    environment = job.environment()
    starter = (
        "import os, subprocess, sys\nos.environ.pop('LC_CTYPE', None)\n"
        "environment = dict(os.environ, CLUSTERDDP_SCRIPT_PID=str(os.getpid()))\n"
        "subprocess.run(['bash', sys.argv[1]], env=environment)\n"
    )
    subprocess.run([sys.executable, "-c", starter, job.run.batch_script], env=environment, check=True, timeout=60)
    assert job.records()[0].environment == {"LR": "0.1", "WD": "2", "PATH": "/opt/x:$PATH"}


def test_what_starts_no_ranks_runs_unchanged(job: Job) -> None:
    job.bash(
        "srun hostname\nsrun cp /etc/hostname /dev/null\nsrun -n 2 bash -c 'echo $SLURM_PROCID'\nsrun --version\n"
        "srun --pty python -c pass\nsrun --multi-prog x.py\nsrun python -c pass : python -c pass\n"
        "srun --no-such-option x python -c pass\nsrun --jobid=8 python -c pass\nsrun ldd /bin/true\n"
    )
    assert job.records() == []
    assert not any(any("clusterddp" in word for word in call) for call in job.calls())
    assert len(job.calls()) == 10
    reasons = [event["reason"] for event in job.events() if event["event"] == "command_not_watched"]
    assert reasons == [
        "--pty",
        "--multi-prog",
        "it starts several programs, with `:` between them",
        "--no-such-option x: an unknown option, and the next word may be its value",
        "--jobid=8 is another job",
    ]


def test_a_launcher_that_cannot_be_watched_runs_all_the_same(job: Job) -> None:
    environment = job.environment()
    shutil.rmtree(job.run.path / "attempts")
    command = ["srun", "python", "-c", "print(1)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("clusterddp: srun runs unchanged: FileNotFoundError")


def test_another_job_that_has_inherited_our_path_runs_its_own(job: Job) -> None:
    environment = job.environment() | {"SLURM_JOB_ID": "8"}
    for command in (["srun", "python", "-c", "print(1)"], ["bash", "-c", "srun python -c 'print(1)'"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert job.records() == []


def test_a_script_that_another_script_submits_has_only_its_own_commands(job: Job, tmp_path: Path) -> None:
    job.environ["BASH_ENV"] = "$HOME/bash_env"
    (tmp_path / "bash_env").write_text("echo user file\n")
    outer = job.environment()
    inner_run = RunDir(tmp_path / "inner")
    inner_run.launcher_dir.mkdir(parents=True)
    inner = install_commands(inner_run, 1, outer | {"SLURM_JOB_ID": "8"}, original="/x")
    assert inner["PATH"] == f"{inner_run.commands}:{job.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "type -t srun"], env=inner, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "user file\nfunction\n"


def test_a_container_without_our_python_runs_the_program(job: Job) -> None:
    job.bash("srun --container-image=x python -c 'print(1)'\n")
    words = job.calls()[0]
    command = words[words.index("/bin/sh") :]
    there = subprocess.run(command, env=job.environ, capture_output=True, text=True, timeout=60, check=False)
    gone = [words.replace(sys.executable, "/nowhere/python") for words in command]
    not_there = subprocess.run(gone, env=job.environ, capture_output=True, text=True, timeout=60, check=False)
    assert (there.stdout, not_there.stdout, not_there.stderr) == ("1\n", "1\n", "")


def test_scontrol_names_the_script_that_was_submitted(job: Job) -> None:
    ours = job.run.launcher_dir / "sbatch" / "train it.slurm"
    job.add_command("scontrol", f'#!/bin/sh\necho "$@"; echo "   Command={ours} {job.run.path} --lr 1"; exit 3\n')
    environment = job.environment("/home/ana/train it.slurm")
    command = ["scontrol", "show", "job", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "show job 7\n   Command=/home/ana/train it.slurm --lr 1\n")
    command = ["scontrol", "requeue", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("requeue 7\n")


def test_a_command_that_is_not_installed_is_not_found(job: Job) -> None:
    done = job.bash("deepspeed a.py\n")
    assert (done.returncode, done.stderr) == (127, "deepspeed: command not found\n")


def test_mpirun_starts_our_task(job: Job) -> None:
    job.bash("mpirun -np 2 -x A -mca btl tcp python -c 'print(1)'\n")
    call = job.calls()[0]
    assert (call[:7], call[-4:]) == (
        ["mpirun", "-np", "2", "-x", "A", "-mca", "btl"],
        ["--", "python", "-c", "print(1)"],
    )
    assert job.records()[0].command == ("mpirun", "-np", "2", "-x", "A", "-mca", "btl", "tcp")


def launch(job: Job, program: list[str], *, step: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the way in which a task of a step becomes it."""
    environment = job.environment() | variables
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environment)
        argv = launcher_argv(program, RunDir(job.run.path, step=step), 1)
    assert argv is not None
    return subprocess.run(argv, env=environment, cwd=job.bin, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "program",
    [
        ["python", "-u", "-m", "torch.distributed.run"],
        ["torchrun"],
        ["BIN/torchrun"],
        ["python", "-W", "ignore", "BIN/torchrun"],
        ["python", "-mtorch.distributed.launch", "--use-env"],
    ],
    ids=" ".join,
)
def test_a_task_that_is_a_launcher_of_python_has_its_ranks_watched(job: Job, program: list[str]) -> None:
    program = [word.replace("BIN", str(Path(sys.executable).parent)) for word in program]
    program += ["--nproc-per-node=1", "--no-python", "trained.py", "x"]
    done = launch(job, program, step="4", SLURM_STEP_NUM_TASKS="1")
    assert done.stdout == "trained x\n", done.stderr
    # This run has no plan, so the task says that it cannot watch, and becomes the program.
    assert [(event["event"], event["step"]) for event in job.events()] == [("step_not_watched", "4")]
    assert job.records() == []


@pytest.mark.parametrize(
    "program", [["python", "train.py"], ["python", "-c", "torchrun"], ["python"], ["bash", "-c", "torchrun x"], ["pip"]]
)
def test_a_task_that_is_no_launcher_stays_as_it_is(job: Job, program: list[str]) -> None:
    assert launcher_argv(program, job.run, 1) is None


def test_agents_that_meet_are_one_step_and_the_next_meeting_is_another(job: Job) -> None:
    asked = {
        "command": ["--nnodes=2"],
        "program": ["python", "-u", "a.py"],
        "num_agents": 2,
        "rendezvous": "c10d a:1 7",
    }
    environment = job.environment()
    facts = json.loads(_wrapper_facts(RunDir(job.run.path, step="9"), 1, "torchrun"))
    steps = []
    for host in ("0", "1", "0", "1"):
        variables = environment | {"SLURM_PROCID": host, "SLURM_STEP_NUM_TASKS": "1"}
        done = subprocess.run(
            facts["ask"], input=json.dumps(asked), env=variables, capture_output=True, text=True, timeout=60, check=True
        )
        steps.append(json.loads(done.stdout)[-2])
    assert steps == ["0", "0", "1", "1"]
    assert [record.command for record in job.records()] == [("torchrun", "--nnodes=2")] * 2


DEEPSPEED_RUNNER = """import subprocess, sys
def main():
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", *sys.argv[1:]]
    sys.exit(subprocess.Popen(command).wait())
"""
DEEPSPEED_LAUNCH = """import os, subprocess, sys
def main():
    processes = []
    for rank in range(2):
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", CROSS_SIZE="1")
        command = [sys.executable, "-u", sys.argv[2], f"--local_rank={rank}", *sys.argv[3:]]
        processes.append(subprocess.Popen(command, env=environment))
    sys.exit(max(process.wait() for process in processes))
if __name__ == "__main__":
    main()
"""


def test_ranks_of_deepspeed_are_the_same_as_without_us(job: Job, tmp_path: Path) -> None:
    # DeepSpeed is a fake here: the two loops of its runner.py and launch.py, which start processes.
    package = tmp_path / "packages" / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for name in (package.parent / "__init__.py", package / "__init__.py"):
        name.write_text("")
    (package / "runner.py").write_text(DEEPSPEED_RUNNER)
    (package / "launch.py").write_text(DEEPSPEED_LAUNCH)
    job.add_command(
        "deepspeed",
        f"#!{sys.executable}\nfrom deepspeed.launcher.runner import main\nif __name__ == '__main__':\n    main()\n",
    )
    job.environ["PYTHONPATH"] = str(package.parents[1])
    (tmp_path / "rank.py").write_text(RANK)
    text = f"deepspeed {tmp_path}/rank.py --lr 'a b'\necho $?"
    plain, ours = job.bash(text, ours=False), job.bash(text)
    assert sorted(ours.stdout.splitlines()) == sorted(plain.stdout.splitlines()), ours.stderr
    (record,) = job.records()
    assert (record.command[0], record.program[-3:]) == ("deepspeed", ("--local_rank=0", "--lr", "a b"))
