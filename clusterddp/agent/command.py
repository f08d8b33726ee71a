"""Runs a program of clusterddp on a login node for a laptop.

Its output is that of the SSH connection. The laptop sends lines of JSON: first the order, then `{"signal": number}`
when the user presses Ctrl-C, and `{}` as a heartbeat every ten seconds. When the connection ends or heartbeats stop,
the command has 120 s to finish; then it gets SIGTERM.

order: {"module": str, "arguments": [str], "variables": {str: str}, "needs": [str], "directory": str | null,
        "runs_dir": str, "discard": str | null}
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from clusterddp.ranks.environment import inherited_environment
from clusterddp.system.timeouts import HEARTBEAT_TIMEOUT_S

MARK = "clusterddp-agent "
_GRACE_S = 120.0
"""How long a command may go on without a connection: sbatch waits for a busy controller."""
_COMMAND = """\
import runpy, sys
sys.path.pop(0)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""As `python -m MODULE`, but nothing is imported from the working directory, which holds the user's own code."""
_FIND_MISSING = "import sys; sys.path.pop(0); from clusterddp.agent.command import say_missing; say_missing()"

Message = dict[str, Any]


def main() -> NoReturn:
    """Run the command, and leave with its exit code."""
    code = _run()
    sys.stdout.flush()
    os._exit(code)  # a thread still reads from the laptop, and a normal exit would wait for it


def _run() -> int:
    say({"ok": True, "have": True})
    order: Message = json.loads(sys.stdin.buffer.readline())
    package = str(Path(__file__).resolve().parents[2])
    environment = inherited_environment() | {"CLUSTERDDP_RUNS": str(Path(order["runs_dir"]).expanduser())}
    environment |= order["variables"]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environment.get("PYTHONPATH"))))
    try:
        missing = _find_missing(order["needs"], environment)
        say({"ok": True, "missing": missing, "python": sys.executable})
        if missing:
            return 0
        sys.stderr.write(f"{MARK}\n")  # output before this line is not the command's
        sys.stderr.flush()
        argv = [sys.executable, "-c", _COMMAND, order["module"], *order["arguments"]]
        cwd = order["directory"] or str(Path.home())
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment, cwd=cwd, start_new_session=True)
        return _wait_for(child)
    finally:
        if order["discard"]:
            shutil.rmtree(order["discard"], ignore_errors=True)


def say(message: Message) -> None:
    """Send one line to the laptop."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
        sys.stdout.flush()


def say_missing() -> None:
    """Print which of the requirements on standard input (`pydantic>=2.7`, one a line) this Python does not meet."""
    for requirement in sys.stdin.read().splitlines():
        name, _, versions = requirement.partition(">=")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(requirement)
            continue
        if _numbers(found) < _numbers(versions.partition(",")[0]):
            print(requirement)


def _find_missing(needs: list[str], environment: dict[str, str]) -> list[str]:
    """Run `say_missing` in a Python with the command's environment, which includes packages in the user's home."""
    if not needs:
        return []
    done = subprocess.run(
        [sys.executable, "-c", _FIND_MISSING],
        input="\n".join(needs),
        env=environment,
        text=True,
        capture_output=True,
        check=True,
    )
    return done.stdout.split()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Forward signals until the command has ended; return its exit code."""
    inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(inbox,), daemon=True).start()
    threading.Thread(target=lambda: inbox.put({"ended": child.wait()}), daemon=True).start()
    patience_s = HEARTBEAT_TIMEOUT_S  # the laptop sends a line every ten seconds
    while True:
        try:
            message = inbox.get(timeout=patience_s)
        except queue.Empty:
            message = None
        if message is None and patience_s == HEARTBEAT_TIMEOUT_S:
            patience_s = _GRACE_S  # the laptop is gone
        elif message is None:
            _signal(child, signal.SIGTERM)
            return 128 + signal.SIGTERM
        elif "ended" in message:
            code = int(message["ended"])
            return code if code >= 0 else 128 - code
        elif "signal" in message:
            _signal(child, message["signal"])


def _listen(inbox: queue.SimpleQueue[Message | None]) -> None:
    with contextlib.suppress(ValueError):  # cut in the middle of a line
        for line in sys.stdin.buffer:
            inbox.put(json.loads(line))
    inbox.put(None)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Signal the command and its children, as a terminal would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
