"""What a checkpoint costs the steps of the trainer in all: the copy, and the steps beside which it is written.

    python benchmarks/checkpoints.py [PAIRS [STEPS]]

One run of two ranks with a thread each trains ResNet-18. Of each pair of segments of STEPS steps one begins with a
checkpoint and the other has none, in turns; the difference of their times is what it costs. Prints a line for each
pair; then the median of the cost, and the ratio of the step times with a checkpoint every minute and with none.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from clusterddp.train.group import Group
from clusterddp.train.loop import train
from tests.support.train_gang import make_run, open_gang, settle

_WARM_STEPS = 5


def main() -> int:
    num_pairs, num_steps = [int(word) for word in (sys.argv[1:] + ["10", "20"][len(sys.argv) - 1 :])]
    with tempfile.TemporaryDirectory() as directory, open_gang() as gang:
        path = make_run(Path(directory) / "run")
        pairs = gang.run(2, measure, path, num_pairs, num_steps)[0]
    for pair in pairs:
        print(json.dumps(pair), flush=True)
    cost_s = statistics.median(pair["with_s"] - pair["without_s"] for pair in pairs)
    step_s = statistics.median(pair["without_s"] for pair in pairs) / num_steps
    found = {"step_s": step_s, "checkpoint_s": cost_s, "ratio_at_one_a_minute": 1 + cost_s / 60}
    print(json.dumps({"pairs": num_pairs, "steps": num_steps} | {key: round(each, 4) for key, each in found.items()}))
    return 0


def measure(group: Group, path: Path, num_pairs: int, num_steps: int) -> list[dict[str, float]]:
    """Return the seconds of each pair of segments."""
    total = _WARM_STEPS + 2 * num_pairs * num_steps + 2
    options: dict[str, Any] = {"model": "resnet18", "dataset": "random", "epochs": 1, "max_steps": total}
    options |= {"samples": 2 * 16 * (total + 1), "checkpoint_minutes": 0, "kernels": "native", "log_every": 1000}
    setting = settle(group, path, **options)
    ends: list[float] = []

    def after_step() -> None:
        ends.append(time.perf_counter())
        segment, step = divmod(len(ends) - _WARM_STEPS, num_steps)
        if step == 0 and segment < 2 * num_pairs and (segment + segment // 2) % 2:
            setting.timer.is_owed = True  # the ranks agree on it in the second step from here

    train(setting, after_step=after_step)
    setting.reporter.close()
    bounds = [ends[_WARM_STEPS - 1 + segment * num_steps] for segment in range(2 * num_pairs + 1)]
    seconds = [later - earlier for earlier, later in itertools.pairwise(bounds)]
    pairs = []
    for pair in range(num_pairs):
        first, second = seconds[2 * pair : 2 * pair + 2]
        without, with_ = (first, second) if pair % 2 == 0 else (second, first)
        pairs.append({"with_s": round(with_, 3), "without_s": round(without, 3)})
    return pairs


if __name__ == "__main__":
    sys.exit(main())
