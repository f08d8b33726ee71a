"""`python -m clusterddp` is the command `clusterddp`."""

import sys

from clusterddp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
