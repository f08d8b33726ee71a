"""`python -m clusterddp.train.data SET DIRECTORY`: makes sure that a data set is there, by a download if needed.

For a machine that has a network, before a job asks for nodes that have none.
"""

from __future__ import annotations

import sys
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.train.data import cifar10
from clusterddp.train.data.image_files import find_files


def main(name: str, directory: str) -> int:
    """Download what is missing, and read the files, so that damage is reported now."""
    data_dir = Path(directory).expanduser()
    try:
        if name == "cifar10":
            cifar10.read_cifar10(data_dir, download=True)
        else:
            find_files(name, data_dir, download=True)
    except ClusterddpError as error:
        print(f"clusterddp: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(f"{name} is in {data_dir}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m clusterddp.train.data SET DIRECTORY")
    sys.exit(main(*sys.argv[1:]))
