"""`python -m clusterddp.places.slurm.supervisor`: the supervisor of a node of a Slurm job, started by its first task.

Slurm's tasks start the ranks, so that Slurm's binding holds for them, or, in a hold, this process does (node_task.py);
and the head asks the controller about the job.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from clusterddp.node.link import Clock
from clusterddp.node.supervisor import JobPlace, main
from clusterddp.places.slurm.job_watch import Allocation, SlurmJobWatch
from clusterddp.places.slurm.node_task import NodeRanks
from clusterddp.places.slurm.tasks import Tasks
from clusterddp.run.supervisors import JobOrder


def _watch_job(job: JobOrder, environ: Mapping[str, str], clock: Clock, stop_lead_s: float) -> SlurmJobWatch:
    return SlurmJobWatch(job, Allocation(job.job_id, environ, clock), stop_lead_s=stop_lead_s)


if __name__ == "__main__":
    sys.exit(main(JobPlace(open_tasks=Tasks, watch_job=_watch_job, without_tasks=NodeRanks)))
