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

from clusterddp.places.slurm.step_command import install_commands
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
        assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
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
