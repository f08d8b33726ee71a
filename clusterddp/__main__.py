"""`python -m clusterddp` is the command `clusterddp`."""

import sys

try:
    from clusterddp.cli.main import start
except KeyboardInterrupt:  # Ctrl-C before the command has begun
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(start())
