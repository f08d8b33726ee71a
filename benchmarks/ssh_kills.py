"""Kill whatever carries runs over SSH, at random, and judge what became of each run from outside.

    python benchmarks/ssh_kills.py [SEED [COUNT [VICTIM ...]]]    (root: it starts a rack)

Two private hosts with two ranks each; every rank has a child and an orphan that ignore SIGTERM. Killed are a rank, a
supervisor, a guard, a supervisor with its guard, the command that submits, the sshd of a
connection, the one that listens, the power of a host, a cable for 60 s; on the first host or the other, during the
start or later; VICTIM names some of them. Right is, within 20 s, and 45 s where a host is lost: no process of the run
on any host that is on, a host whose cable is pulled included, or, where the run has to bear it, the same ranks as
before; and a `status` asked for in that time prints the right state and cause (it waits 5 s for a host that is silent).
One line of JSON per kill, a summary at the end; on standard error all logs of what was borne otherwise.
tests/support/ssh_kills.py holds the rules.
"""

from __future__ import annotations

import collections
import json
import statistics
import sys
import time

from tests.support.ssh_kill_kinds import LAN, draw_kills
from tests.support.ssh_kills import play_round
from tests.testbed.rack import running_rack


def main() -> int:
    seed, count = [int(argument) for argument in (sys.argv[1:3] + ["1", "50"][len(sys.argv[1:3]) :])]
    began = time.monotonic()
    lines = []
    with running_rack(LAN) as rack:
        for number, kill in enumerate(draw_kills(seed, count, tuple(sys.argv[3:]))):
            line, logs = play_round(rack, kill, seed=seed, number=number)
            print(json.dumps(line), flush=True)
            if logs:
                print(f"---- seed {seed} number {number}: {line['wrong']}\n{logs}", file=sys.stderr, flush=True)
            lines.append(line)
    print(json.dumps(summary(lines) | {"seed": seed, "minutes": round((time.monotonic() - began) / 60, 1)}))
    return 0 if all(line["right"] for line in lines) else 1


def summary(lines: list[dict[str, object]]) -> dict[str, object]:
    """Count what was borne as it should be, by victim; the longest times."""
    by_victim = collections.defaultdict(list)
    for line in lines:
        by_victim[str(line["victim"])].append(line)
    gone = [float(str(line["gone_s"])) for line in lines if "gone_s" in line]
    return {
        "right": sum(bool(line["right"]) for line in lines),
        "of": len(lines),
        "by_victim": {
            victim: f"{sum(bool(each['right']) for each in some)}/{len(some)}"
            for victim, some in sorted(by_victim.items())
        },
        "asked_s_max": max((line["asked_s"] for line in lines if "asked_s" in line), default=None),
        "gone_s_median": statistics.median(gone) if gone else None,
        "gone_s_max": max(gone, default=None),
        "told_s_max": max((line["told_s"] for line in lines if "told_s" in line), default=None),
    }


if __name__ == "__main__":
    sys.exit(main())
