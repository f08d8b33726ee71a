"""A rack for a person, with a shell on its head; `python -m tests.testbed lan`: hosts that share nothing."""

import os
import subprocess
import sys

from tests.testbed.plan import HEAD, USER, RackPlan
from tests.testbed.rack import find_obstacle, running_rack

obstacle = find_obstacle()
if obstacle:
    sys.exit(obstacle)
lan = sys.argv[1:] == ["lan"]
with running_rack(RackPlan(private_hosts=lan, slurm=not lan)) as rack:
    place = "the nodes share nothing and have torch" if lan else f"shared storage: {rack.dir}/shared"
    print(f"nodes: {', '.join(rack.plan.nodes)}; users: root, {USER}; {place}")
    print("a shell on the login node follows; leaving it ends the cluster")
    subprocess.run(rack.argv(HEAD, ["bash", "-i"], env={"TERM": os.environ.get("TERM", "dumb")}), check=False)
