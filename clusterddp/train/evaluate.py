"""Accuracy on the test set, each sample counted once by any number of ranks; the weights' running mean and TTA."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from clusterddp.errors import ClusterddpError
from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.group import Group, sum_over_ranks

_BATCH = {"cpu": 250, "cuda": 2000}  # of 32x32 pixels; on a CPU larger batches are slower (they leave the cache)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result on the whole test set after `step` optimizer steps."""

    step: int
    correct: int
    samples: int
    loss: float
    """Mean cross-entropy, without label smoothing."""

    correct_tta: int | None = None
    """Right answers with test-time augmentation; None: without it, or before the end of the run."""
    correct_ema: int | None = None
    """Right answers of the weights' running mean; None: there is none."""
    correct_ema_tta: int | None = None

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    def with_average(self, average: Evaluation) -> Evaluation:
        """Return this with the counts of `average`, the evaluation of the weights' running mean."""
        return replace(self, correct_ema=average.correct, correct_ema_tta=average.correct_tta)

    @property
    def accuracies_apart(self) -> dict[str, float]:
        """The accuracies with TTA or the running mean, those that were measured, apart from the plain one."""
        others = {"tta": self.correct_tta, "ema": self.correct_ema, "ema_tta": self.correct_ema_tta}
        return {f"accuracy_{name}": hits / self.samples for name, hits in others.items() if hits is not None}


class Ema:
    """The exponential moving average of a model's parameters and floating-point buffers, as a model of its own.

    It is smoother than the weights and often more accurate. Counters (batch norm's num_batches_tracked) keep their
    first value. Where weights differ between ranks, so do the averages; an average is linear in the weights, so the
    mean of the averages is the average of the mean.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._averages, self._weights = (
            [each.detach() for each in chain(one.parameters(), one.buffers()) if each.is_floating_point()]
            for one in (self.model, model)
        )

    @torch.no_grad()
    def update(self, *, step: int) -> None:
        """Move towards the weights as they are after optimizer step `step` (from 1 on).

        Early steps count for more, or the initial weights would be remembered for long. Source: the `num_updates` of
        tensorflow.train.ExponentialMovingAverage.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    group: Group,
    *,
    step: int,
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    stop: Callable[[], bool] = lambda: False,
    slot: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    tta: str = "none",
) -> Evaluation | None:
    """Evaluate the inner (unwrapped) `model`, the test set divided among the ranks; None when `stop` interrupted it.

    `model` must be the same on all ranks: `Exchange.averaged` makes it so. Every rank calls `stop` equally often.
    With `tta` (mirror, mirror_translate) the answers over several views are counted too, separately. `slot` wraps each
    batch.
    """
    num_samples = len(dataset.test_labels)
    counts = torch.zeros(3, dtype=torch.int64, device=group.device)  # right answers, samples, right answers with TTA
    loss_sum = torch.zeros(1, dtype=torch.float64, device=group.device)

    def answer(images: Tensor) -> Tensor:
        with autocast():
            logits: Tensor = model(images)
        return logits.float()

    model.eval()
    with torch.no_grad():
        for indices in _own_batches(num_samples, dataset.image_size, group):
            if stop():
                model.train()
                return None
            if not len(indices):
                continue
            with slot():
                images, labels = dataset.test_images[indices], dataset.test_labels[indices]
                images = normalize(
                    images, mean=dataset.mean, std=dataset.std, channels_last=True, size=dataset.image_size
                )
                logits = answer(images)
                counts[0] += (logits.argmax(1) == labels).sum()
                counts[1] += len(labels)
                loss_sum += cross_entropy(logits, labels, reduction="sum")
                if tta != "none":
                    counts[2] += (mean_logits(answer, images, logits, tta=tta).argmax(1) == labels).sum()
    model.train()
    correct, total, correct_tta = sum_over_ranks(counts, group).tolist()
    if total != num_samples:
        raise ClusterddpError(f"evaluation counted {total:,} samples of {num_samples:,}: the ranks' shards do not fit")
    return Evaluation(
        step=step,
        correct=correct,
        samples=total,
        loss=sum_over_ranks(loss_sum, group).item() / total,
        correct_tta=None if tta == "none" else correct_tta,
    )


def mean_logits(answer: Callable[[Tensor], Tensor], images: Tensor, plain: Tensor, *, tta: str) -> Tensor:
    """Test-time augmentation: return the mean of the logits over the views that `tta` names (mirror, mirror_translate).

    mirror: the image and its mirror image, half each. mirror_translate: half of that, a quarter each of the same moved
    by one pixel up and left, and down and right, the edge reflected. Source: airbench94, `infer_mirror_translate`.
    images: normalised, [batch, channel, height, width]; plain: their own logits, [batch, class], known already.
    """
    mirrored = (plain + answer(images.flip(3))) / 2
    if tta == "mirror":
        return mirrored
    height, width = images.shape[2:]
    wider = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    moved = [wider[:, :, corner : corner + height, corner : corner + width] for corner in (0, 2)]
    both = [(answer(view) + answer(view.flip(3))) / 2 for view in moved]
    return mirrored / 2 + (both[0] + both[1]) / 4


def _own_batches(num_samples: int, image_size: int, group: Group) -> Iterator[Tensor]:
    """Yield the indices of this rank's batches, as many on every rank, so that the last one may be empty.

    Each rank takes every world_size-th sample, without the padding of DistributedSampler, so shards may differ by one;
    the forward pass has no collectives.
    """
    batch = _BATCH[group.device.type] * 32 // max(32, image_size)
    shard = torch.arange(num_samples, device=group.device)[group.rank :: group.world_size]
    for start in range(0, math.ceil(num_samples / group.world_size), batch):
        yield shard[start : start + batch]
