"""`python -m clusterddp.places.slurm.node_task RUN_DIR ATTEMPT`: the one task on each node of a run in a hold.

The supervisor that it starts forks the node's ranks from one import of torch, which is most of what a start costs. They
share the cores of their node.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.node.processes import STOP_SIGNALS
from clusterddp.node.rank_starter import Children, Launch
from clusterddp.places.slurm.task import await_record, heads_of, order_supervisor, read_plan_file, start_deaf
from clusterddp.ranks.environment import Variable, rank_cookies
from clusterddp.ranks.slurm_step import read_place
from clusterddp.run.cleanup import end_processes
from clusterddp.run.directory import RunDir

_CORES = "SLURM_CPUS_PER_TASK"
_ORIGIN = "as Slurm would set it for a task"


def main() -> int:
    """Carry the supervisor of this node; the exit code is its own."""
    run, attempt = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    try:
        place, gang = read_place(os.environ), read_plan_file(run.plan)["gang"]
        ranks = tuple(tuple(node["ranks"]) for node in gang["nodes"])
        if len(ranks) != place.world_size:
            raise ClusterddpError(f"the plan has {len(ranks)} nodes, srun has started {place.world_size} tasks")
        place = dataclasses.replace(place, ranks=ranks)
        order = order_supervisor(run, attempt, gang, place, heads=heads_of(place), tasks=None)
    except ClusterddpError as error:
        sys.stderr.write(f"clusterddp: {socket.gethostname()}: {error.message}\n")
        return 1
    if order.gang.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the hold may have GPUs
    supervisor = start_deaf(order)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: supervisor.send_signal(number))
    code = supervisor.wait()
    if code:
        # srun ends the step at this exit code, and with it every process that has still something to record.
        end_processes(*rank_cookies(order.gang.token, place.node_rank), timeout_s=5.0)
        await_record(run)
    return 128 - code if code < 0 else code


class NodeRanks(Children):
    """The ranks of one node, forked where possible, with the variables that tasks of their own would have."""

    def start(self, launches: Mapping[int, Launch]) -> None:
        cores = int(self._environment.get(_CORES) or 0) // len(launches)
        super().start({rank: _with_variables(each, len(launches), cores) for rank, each in launches.items()})


def _with_variables(launch: Launch, num_launches: int, cores: int) -> Launch:
    values = launch.values()
    world, local = int(values["WORLD_SIZE"]), int(values["LOCAL_WORLD_SIZE"])
    if local != num_launches:
        return launch  # the program starts its ranks itself: it has one task on each node in any job
    per_node = f"{local}(x{world // local})" if world > local else str(local)
    slurms = {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(world)),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
        "SLURM_NTASKS_PER_NODE": str(local),
        "SLURM_PROCID": values["RANK"],
        "SLURM_LOCALID": values["LOCAL_RANK"],
        **({_CORES: str(cores)} if cores else {}),
    }
    variables = {name: Variable(value, _ORIGIN) for name, value in slurms.items()}
    return dataclasses.replace(launch, variables=variables | dict(launch.variables))


if __name__ == "__main__":
    sys.exit(main())
