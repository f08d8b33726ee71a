"""Break the storage of runs on Slurm and over SSH, and judge what became of each run from outside.

    python benchmarks/storage_faults.py [SEED [COUNT [slurm|ssh]]]    (root: it starts racks)

Runs of two nodes with a rank each. Their storage is away for 2, 10 or 25 s, while they run or while their ranks end; or
a disk of ext4 is full, or has turned read-only, for good. On Slurm all hosts share the storage; over SSH it is one
host's, the head's or the other's. Right is: a run whose storage was away is COMPLETED with the ranks that it had, its
directory was not made anew, no process is left; on a disk that takes no record a rank fails, and `status` names it as
the cause. One line of JSON per fault, a summary at the end; on standard error all logs of what was borne otherwise.
tests/support/storage_rounds.py holds the rules.
"""

from __future__ import annotations

import collections
import json
import sys
import time

from tests.support.ssh_kill_kinds import LAN
from tests.support.storage_rounds import NODES, draw_faults, play_round
from tests.testbed.plan import RackPlan
from tests.testbed.rack import running_rack

PLANS = {"slurm": RackPlan(nodes=NODES), "ssh": LAN}


def main() -> int:
    seed, count = [int(argument) for argument in (sys.argv[1:3] + ["1", "30"][len(sys.argv[1:3]) :])]
    began, lines = time.monotonic(), []
    faults = list(enumerate(draw_faults(seed, count)))
    for launcher in sys.argv[3:] or PLANS:
        with running_rack(PLANS[launcher]) as rack:
            for number, fault in faults:
                if fault.launcher != launcher:
                    continue
                line, logs = play_round(rack, fault)
                print(json.dumps({"seed": seed, "number": number, **line}), flush=True)
                if logs:
                    print(f"---- seed {seed} number {number}: {line['wrong']}\n{logs}", file=sys.stderr, flush=True)
                lines.append(line)
    by_kind = collections.defaultdict(list)
    for line in lines:
        by_kind[f"{line['launcher']} {line['what']} {line['seconds']:g}"].append(bool(line["right"]))
    summary = {"right": sum(bool(line["right"]) for line in lines), "of": len(lines), "seed": seed}
    kinds = {kind: f"{sum(rights)}/{len(rights)}" for kind, rights in sorted(by_kind.items())}
    print(json.dumps(summary | {"by_kind": kinds, "minutes": round((time.monotonic() - began) / 60, 1)}))
    return 0 if all(line["right"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
