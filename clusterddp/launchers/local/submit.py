"""`python -m clusterddp.launchers.local.submit RUN_DIR ATTEMPT`: hand a run to submitit, record its keeper, leave.

The keeper in the record is submitit's controller. It and the task that it starts live and die together: the controller
ends when its task has ended, and the task has the kernel kill it when the controller ends.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from clusterddp.launchers.local.task import carry
from clusterddp.run.directory import RunDir
from clusterddp.run.record import ProcessIdentity, log_event, read_run, write_run

_TIMEOUT_MIN = 10 * 365 * 24 * 60
"""submitit's own limit, two minutes by default, must never be the one that ends a run: the supervisors keep time."""


def main() -> None:
    """Submit the attempt to submitit's local executor."""
    import submitit

    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    executor = submitit.LocalExecutor(run.launcher_dir / "submitit")
    executor.update_parameters(timeout_min=_TIMEOUT_MIN)
    # By reference: the task imports `carry` from this package. Arguments are a path and a number, nothing to unpickle.
    job = executor.submit(carry, str(run.path), attempt)
    try:
        keeper = dataclasses.asdict(ProcessIdentity.of(int(job.job_id)))
    except ProcessLookupError:
        sys.exit(f"submitit's controller (pid {job.job_id}) ended at once")
    write_run(run, dataclasses.replace(read_run(run), job_id=job.job_id, keeper=keeper))
    log_event(run, "submitted", attempt=attempt, job_id=job.job_id)


if __name__ == "__main__":
    main()
