"""A command as the entry of a rank: a child of the rank, which exits as the command does.

The rank stays, because a command has no stop contract: signals to the rank still create the stop file. A module of its
own, because its imports would slow the start of every rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from clusterddp.run.stop import stop_requested
from clusterddp.system.processes import end_by

_POLL_S = 0.5


def run_command(argv: Sequence[str], entry: dict[str, Any]) -> NoReturn:
    """Run the command in the rank's process group and exit as it does: with its exit code, or by the same signal."""
    paths: list[str] = entry["import_paths"]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, environment.get("PYTHONPATH", "")]))
    if shutil.which(argv[0]) is None:
        raise SystemExit(_refusal(argv[0], entry))
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise SystemExit(f"entry.command: {argv[0]}: {error.strerror}") from error
    returncode = _wait(process, str(entry.get("stop_signal", "none")))
    if returncode < 0:
        end_by(-returncode)
    sys.exit(returncode)


def _wait(process: subprocess.Popen[bytes], stop_signal: str) -> int:
    """Wait for the command; send it the stop signal, if it has one, when the gang is asked to stop."""
    stop_file = os.environ.get("CLUSTERDDP_STOP_FILE")
    if stop_signal == "none" or stop_file is None:
        return process.wait()
    while not stop_requested(Path(stop_file)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
    number = signal.Signals[f"SIG{stop_signal}"]
    signal.signal(number, signal.SIG_IGN)  # the whole group gets it: a shell does not forward it to its programs
    os.killpg(0, number)
    returncode = process.wait()
    return 0 if returncode in (-number, 128 + number) else returncode


def _refusal(program: str, entry: dict[str, Any]) -> str:
    if os.sep not in program:
        return f"entry.command: {program}: no such program on PATH ({os.environ.get('PATH', '')})"
    if not Path(program).exists():
        return f"entry.command: {program}: no such file in {entry['working_dir']}"
    return f"entry.command: {program}: not executable (chmod +x {program}, or name its interpreter first)"
