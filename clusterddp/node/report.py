"""`python -m clusterddp.node.report RUN_DIR`: write the run's report; a failure is an event of its history.

The command `clusterddp report` writes it, where its packages are there: a container for ranks may lack them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

from clusterddp.run.directory import RunDir
from clusterddp.run.record import log_event

_TIMEOUT_S = 30.0
_MAX_ERROR = 300


def main(run: RunDir) -> int:
    """Write the report within `_TIMEOUT_S`."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a batch system signals every process of a job
    if importlib.util.find_spec("click") is None or not run.record.is_file():
        return 0
    os.nice(5)
    command = [sys.executable, "-m", "clusterddp", "report", "--runs", str(run.path.parent), "--", run.name]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        log_event(run, "report_failed", error=f"it was not written within {_TIMEOUT_S:g} s")
        return 1
    if done.returncode != 0:
        first = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        log_event(run, "report_failed", error=first[:_MAX_ERROR])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(RunDir(Path(sys.argv[1]))))
