"""`python -m clusterddp.launchers.local.submit RUN_DIR ATTEMPT`: submit a run to submitit and record its keeper.

The keeper is submitit's controller process. The controller exits when the task that it started has exited; the kernel
kills the task when the controller exits.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from clusterddp.launchers.local.task import carry
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run

_TIMEOUT_MIN = 10 * 365 * 24 * 60
"""submitit's own limit (2 minutes by default) must never end a run: the supervisors enforce the time limit."""


def main() -> None:
    """Submit the attempt to submitit's local executor."""
    import submitit

    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    executor = submitit.LocalExecutor(run.launcher_dir / "submitit")
    executor.update_parameters(timeout_min=_TIMEOUT_MIN)
    # The pickle names `carry` by its module, which the task imports; the arguments are a path and a number.
    job = executor.submit(carry, str(run.path), attempt)
    try:
        keeper = dataclasses.asdict(ProcessIdentity.of(int(job.job_id)))
    except ProcessLookupError:
        sys.exit(f"submitit's controller (pid {job.job_id}) ended at once")
    write_run(run, dataclasses.replace(read_run(run), job_id=job.job_id, keeper=keeper))
    log_event(run, "submitted", attempt=attempt, job_id=job.job_id)


if __name__ == "__main__":
    main()
