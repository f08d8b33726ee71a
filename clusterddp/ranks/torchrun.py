"""The command of torchrun's agent on one node, for a spec that asks for `start: torchrun`."""

from __future__ import annotations

import os

HOLDER = "clusterddp.node.torchrun_rank"
"""The module that torchrun starts for each rank."""


def torchrun_arguments(
    *, run: str, num_nodes: int, node_rank: int, num_ranks: int, master_addr: str, port: int | str, restarts: int
) -> tuple[str, ...]:
    """Return the arguments of Python that make it torchrun's agent on a node with `num_ranks` ranks.

    `port`: of torchrun's store on node 0; a text in a plan, where it is not known yet. `restarts`: how often torchrun
    may restart the ranks.
    """
    return (
        "-m",
        "torch.distributed.run",
        f"--nnodes={num_nodes}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={num_ranks}",
        f"--master-addr={f'[{master_addr}]' if ':' in master_addr else master_addr}",
        f"--master-port={port}",
        f"--rdzv-id={run}",
        f"--max-restarts={restarts}",
        f"--log-dir={os.devnull}",  # the ranks have their own logs; else it leaves a directory in /tmp
        "-m",
        HOLDER,
    )
