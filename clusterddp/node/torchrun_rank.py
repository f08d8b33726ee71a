"""What torchrun's agent starts, once per rank: `python -m clusterddp.node.torchrun_rank SOCKET`.

It holds its rank for the node's supervisor, at whose socket it knocks, and leaves with an exit code that tells torchrun
to start the ranks again, or that all is well. It imports next to nothing.
"""

from __future__ import annotations

import os
import sys

from clusterddp.errors import ClusterddpError
from clusterddp.node.holder import Holder, connect
from clusterddp.node.processes import die_with_parent
from clusterddp.node.taskwire import PREFIX


def main() -> int:
    """Hold the rank that torchrun says we are."""
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
    # No word of GPUs: torchrun gives all of the node's to each rank, LOCAL_RANK counts to its own.
    exit_code = holder.serve(sock, {"rank": int(os.environ["RANK"])})
    if exit_code is None:
        holder.kill_rank()
        return holder.exit_code(1)
    return holder.exit_code(exit_code)


if __name__ == "__main__":
    sys.exit(main())
