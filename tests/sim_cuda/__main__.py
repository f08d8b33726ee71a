"""Print what a training step does to a GPU, which is not there.

python -m tests.sim_cuda
"""

import sys
import tempfile
from pathlib import Path

from tests.sim_cuda.driver import find_obstacle
from tests.sim_cuda.trainings import run_alone, run_pair, table

obstacle = find_obstacle()
if obstacle:
    sys.exit(obstacle)
with tempfile.TemporaryDirectory() as directory:
    answers = [run_alone(Path(directory)), run_pair(Path(directory))[0]]
print(table(answers[0]["counted"] | answers[1]["counted"]), end="")
