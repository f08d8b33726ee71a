"""`python -m clusterddp.places.local.submit RUN_DIR ATTEMPT`: hand a run to submitit's local executor.

submitit starts its controller, and the controller the task (task.py); all three inherit standard input, on which the
task answers. The module is not the task's own, since submitit's pickle names the task's function by its module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from clusterddp.places.local.task import run_attempts
from clusterddp.run.directory import RunDir

_TIMEOUT_MIN = 10 * 365 * 24 * 60
"""submitit's own limit (2 minutes by default) must never end a run: the supervisors enforce the time limit."""


def main() -> None:
    """Submit the attempt."""
    import submitit

    run_dir, attempt = sys.argv[1], int(sys.argv[2])
    executor = submitit.LocalExecutor(RunDir(Path(run_dir)).launcher_dir / "submitit")
    executor.update_parameters(timeout_min=_TIMEOUT_MIN)
    # The executor replaces CUDA_VISIBLE_DEVICES, so the task is told what it was.
    executor.submit(run_attempts, run_dir, attempt, os.environ.get("CUDA_VISIBLE_DEVICES"))


if __name__ == "__main__":
    main()
