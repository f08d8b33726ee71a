"""Cut cables for a while, stop supervisors, suspend jobs, and count the training runs that go on undisturbed.

    python benchmarks/outages.py [SEED [COUNT [KIND ...]]]    (root: it starts racks)

Kinds: "cable out" (5, 9, 15 or 25 s) and "supervisor stopped" (20 s) over SSH, "job suspended" (90 s) on Slurm. A run
trains on two hosts with one rank each. Right is that it completes in its first attempt with the `params_sha256` of a
run without an outage. One line of JSON per run, a summary at the end; on standard error the logs of what went wrong.
tests/support/outages.py holds the rules.
"""

from __future__ import annotations

import collections
import json
import sys
import time

from tests.support.outages import Theatre, draw_outages


def main() -> int:
    seed, count = [int(argument) for argument in (sys.argv[1:3] + ["1", "40"][len(sys.argv[1:3]) :])]
    began = time.monotonic()
    right: collections.Counter[str] = collections.Counter()
    all_of: collections.Counter[str] = collections.Counter()
    with Theatre() as theatre:
        for number, outage in enumerate(draw_outages(seed, count, tuple(sys.argv[3:]))):
            line = theatre.play(outage)
            logs = line.pop("logs", None)
            print(json.dumps({"seed": seed, "number": number} | line), flush=True)
            if logs:
                print(f"---- seed {seed} number {number}\n{logs}", file=sys.stderr, flush=True)
            what = f"{outage.kind} for {outage.seconds:g} s"
            all_of[what] += 1
            right[what] += line["right"]
    by_kind = {what: f"{right[what]}/{number}" for what, number in sorted(all_of.items())}
    minutes = round((time.monotonic() - began) / 60, 1)
    print(json.dumps({"right": right.total(), "of": all_of.total(), "by_kind": by_kind, "minutes": minutes}))
    return 0 if right == all_of else 1


if __name__ == "__main__":
    sys.exit(main())
