"""The process that torchrun's agent starts for each rank: `python -m clusterddp.node.torchrun_rank SOCKET`.

It connects to the socket of the node's supervisor, holds the rank for it (holder.py), and exits with a code by which
torchrun starts the ranks again or ends. It imports next to nothing.
"""

from __future__ import annotations

import os
import sys

from clusterddp.errors import ClusterddpError
from clusterddp.node.holder import Holder, connect
from clusterddp.node.processes import die_with_parent
from clusterddp.node.taskwire import PREFIX


def main() -> int:
    """Hold the rank that RANK names."""
    holder = Holder()
    die_with_parent()
    try:
        sock = connect(PREFIX + sys.argv[1])
    except ClusterddpError as error:
        sys.stderr.write(f"clusterddp: {error.message}\n")
        return 1
    if sock is None:
        sys.stderr.write("clusterddp: the supervisor of this node is gone\n")
        return 1
    # It reports no GPUs: torchrun shows each rank all of the node's, and LOCAL_RANK is the index of its own.
    exit_code = holder.serve(sock, {"rank": int(os.environ["RANK"])})
    if exit_code is None:
        holder.kill_rank()
        return holder.exit_code(1)
    return holder.exit_code(exit_code)


if __name__ == "__main__":
    sys.exit(main())
