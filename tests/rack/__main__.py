"""`python -m rack`: a rack for a person, with a shell on its head."""

import os
import subprocess
import sys

from rack.plan import HEAD, USER
from rack.rack import find_obstacle, running_rack

obstacle = find_obstacle()
if obstacle:
    sys.exit(obstacle)
with running_rack() as rack:
    print(f"nodes: {', '.join(rack.plan.nodes)}; users: root, {USER}; shared storage: {rack.dir}/shared")
    print("a shell on the head follows; leaving it ends the rack")
    subprocess.run(rack.argv(HEAD, ["bash", "-i"], env={"TERM": os.environ.get("TERM", "dumb")}), check=False)
