"""Alone in a PID namespace: `while_gc_asks.py WHAT`; what happens between the question of gc and the answer yes.

WHAT: `pid` gives the pid of the only left-over process to a stranger; `supervisor` starts one for the run. Prints
{"same_pid": the stranger has that pid, "alive": the process in question lives after gc, "said": what gc said}.
"""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

SLEEPER = ["sleep", "600"]


def carry(role):
    """Start a process of the run, and wait until it has become what it is."""
    process = subprocess.Popen(SLEEPER, env={"CLUSTERDDP_COOKIE": f"{'a1' * 16}.{role}", "PATH": os.defpath})
    while b"CLUSTERDDP_COOKIE" not in Path(f"/proc/{process.pid}/environ").read_bytes():
        pass
    return process


def read_until(terminal, text):
    said = ""
    while text not in said:
        try:
            said += os.read(terminal, 4096).decode()
        except OSError:
            return said
    return said


left_over = carry("n0")
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-m", "clusterddp", "gc"])
said = read_until(terminal, "[y/N]")
same_pid = None
if sys.argv[1] == "pid":
    left_over.kill()
    left_over.wait()
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(left_over.pid - 1))
    in_question = subprocess.Popen(SLEEPER, env={"PATH": os.defpath})
    same_pid = in_question.pid == left_over.pid
else:
    in_question = left_over
    carry("s0")
os.write(terminal, b"y\n")
said += read_until(terminal, "never said")
os.waitpid(pid, 0)
print(json.dumps({"same_pid": same_pid, "alive": in_question.poll() is None, "said": said}))
