"""What a rank measures of its training besides loss and accuracy: one set of gauges for a model that is trained."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor, nn

from clusterddp.train.group import Group
from clusterddp.train.report.clock import StepClock
from clusterddp.train.report.figures import Conditions, RankNumbers, Totals, sum_up
from clusterddp.train.report.flops import count_flops, read_peak
from clusterddp.train.report.straggler import StragglerWatch, find_slowest


class Gauges:
    """The clock of this rank's steps, the watch for stragglers, and the arithmetic of an image."""

    def __init__(
        self, model: nn.Module, image_shape: tuple[int, int, int], group: Group, *, num_devices: int = 1
    ) -> None:
        """`image_shape`: channel, height and width of what `model` is trained with."""
        self.clock = StepClock(group.device)
        self.clock.follow(model)
        self._flop_per_image = count_flops(model, torch.zeros(1, *image_shape, device=group.device))
        self._watch = StragglerWatch(group)
        self._group = group
        self._steps_ms: list[float] = []
        self._num_devices = num_devices
        self._peak_tflop_per_s: float | None = None

    def read(self, precision: str) -> Tensor:
        """Read this rank's numbers of the window, in its row of [rank, number]: the sum over ranks is for `sum_up`.

        On a GPU this waits for the steps to be done.
        """
        times = self.clock.read()
        self._steps_ms = times.steps_ms
        peak = read_peak(self._group.device, precision)
        own = RankNumbers.of(times, self._group.device, self._num_devices * peak.tflop_per_s if peak else 0.0).to_list()
        rows = torch.zeros(self._group.world_size, len(own), dtype=torch.float64)
        rows[self._group.rank] = torch.tensor(own, dtype=torch.float64)
        return rows

    def sum_up(self, rows: list[list[float]], *, bytes_per_step: float) -> tuple[Totals, str | None]:
        """Make a window's totals of all ranks' rows; beside them what is to be told of a straggler."""
        ranks = [RankNumbers.from_list(row) for row in rows]
        busy_ms = [rank.busy_ms for rank in ranks]
        news = self._watch.look(busy_ms)
        totals = sum_up(ranks, self._steps_ms, bytes_per_step=bytes_per_step, spread=find_slowest(busy_ms)[1])
        totals.straggler = None if self._watch.named is None else asdict(self._watch.named)
        peaks = [rank.peak_tflop_per_s for rank in ranks]
        self._peak_tflop_per_s = sum(peaks) if all(peaks) else None
        return totals, news

    def conditions(self, *, precision: str, comm: str, exact: bool) -> Conditions:
        """Tell what the newest window's steps ran with."""
        peak = read_peak(self._group.device, precision)
        return Conditions(
            world_size=self._group.world_size,
            precision=precision,
            comm=comm,
            exact=exact,
            flop_per_image=self._flop_per_image,
            peak_tflop_per_s=self._peak_tflop_per_s,
            peak_source=peak.source if peak else None,
        )
