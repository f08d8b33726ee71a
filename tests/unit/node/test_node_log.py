"""The output of supervisors and ranks on a disk that takes nothing."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from clusterddp.node.log import log_line
from clusterddp.node.rank import drop_unwritten_output
sys.stdout.write("lost")
log_line("lost")
if sys.argv[1] == "dropped":
    drop_unwritten_output()
sys.exit(3)
"""


@pytest.mark.parametrize(("output", "exit_code"), [("dropped", 3), ("kept", 120)])
def test_output_that_a_full_disk_does_not_take_is_dropped_for_the_exit_code(output, exit_code):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        argv = [sys.executable, "-c", PROGRAM, output]
        assert subprocess.run(argv, stdout=full, stderr=full, env=environ, check=False).returncode == exit_code
