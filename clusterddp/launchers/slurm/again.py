"""`python -m clusterddp.launchers.slurm.again RUN_DIR ATTEMPT`: start the job again for the next attempt.

A supervisor runs this when the host of the batch script is lost, which would have done it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.launchers.slurm.carried import JobStart, read_carried
from clusterddp.launchers.slurm.requeue import go_on
from clusterddp.ranks.environment import inherited_environment
from clusterddp.run.directory import RunDir


def main() -> int:
    """See to the next start of the job; say what does it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    environ = inherited_environment()
    try:
        carried = read_carried(run, JobStart.of_environment(environ), environ)
        by = go_on(carried, run.attempt(attempt))
    except (ClusterddpError, OSError) as error:
        print(f"clusterddp: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"attempt {attempt + 1} is started by {by}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
