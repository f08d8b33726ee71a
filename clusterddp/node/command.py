"""A command as the entry of a rank: a child of the rank, whose end becomes the rank's own.

The rank stays, for a command knows nothing of the stop contract: signals to the rank become the stop file, as ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


def run_command(argv: Sequence[str], entry: dict[str, Any]) -> NoReturn:
    """Run the command in the rank's process group and leave as it leaves: by its exit code, or by the same signal."""
    paths: list[str] = entry["import_paths"]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, environment.get("PYTHONPATH", "")]))
    if shutil.which(argv[0]) is None:
        raise SystemExit(_refusal(argv[0], entry))
    try:
        process = subprocess.Popen(argv, env=environment)
    except OSError as error:
        raise SystemExit(f"entry.command: {argv[0]}: {error.strerror}") from error
    returncode = process.wait()
    if returncode < 0:
        _end_by(-returncode)
    sys.exit(returncode)


def _refusal(program: str, entry: dict[str, Any]) -> str:
    if os.sep not in program:
        return f"entry.command: {program}: no such program on PATH ({os.environ.get('PATH', '')})"
    if not Path(program).exists():
        return f"entry.command: {program}: no such file in {entry['working_dir']}"
    return f"entry.command: {program}: not executable (chmod +x {program}, or name its interpreter first)"


def _end_by(number: int) -> NoReturn:
    """End by a signal, without a core of our own beside the command's."""
    faulthandler.disable()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)
