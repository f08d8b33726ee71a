"""Accuracy on the test set: every sample counted exactly once, by whatever number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clusterddp.errors import ClusterddpError
from clusterddp.train.data.augment import normalize
from clusterddp.train.data.dataset import Dataset
from clusterddp.train.group import Group, sum_over_ranks
from clusterddp.train.tta import mean_logits

_BATCH = {"cpu": 250, "cuda": 2000}  # of 32x32 pixels; on a CPU larger batches are slower (they leave the cache)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What the whole test set says about the model after `step` optimizer steps."""

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
        """Return this with what `average`, of the weights' running mean, has found."""
        return replace(self, correct_ema=average.correct, correct_ema_tta=average.correct_tta)

    @property
    def accuracies_apart(self) -> dict[str, float]:
        """The accuracies that are got by other means and never mixed up with the plain one, those that there are."""
        others = {"tta": self.correct_tta, "ema": self.correct_ema, "ema_tta": self.correct_ema_tta}
        return {f"accuracy_{name}": hits / self.samples for name, hits in others.items() if hits is not None}


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    group: Group,
    *,
    step: int,
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    stop: Callable[[], bool] = lambda: False,
    turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    tta: str = "none",
) -> Evaluation | None:
    """Evaluate the inner (unwrapped) `model`, shared out over the ranks; None when `stop` said so before the end.

    It must be the same on all ranks: `Exchange.averaged` sees to that.

    Each rank takes every world_size-th sample, without the padding of DistributedSampler, so shards may differ by
    one; the forward pass has no collectives and does not mind. `stop` is asked equally often on every rank. With `tta`
    (mirror, mirror_translate) the answers over several views are counted too, apart. `turn` goes around each batch.
    """
    num_samples = len(dataset.test_labels)
    batch = _BATCH[group.device.type] * 32 // max(32, dataset.image_size)
    shard = torch.arange(num_samples, device=group.device)[group.rank :: group.world_size]
    counts = torch.zeros(3, dtype=torch.int64, device=group.device)
    loss_sum = torch.zeros(1, dtype=torch.float64, device=group.device)

    def answer(images: Tensor) -> Tensor:
        with autocast():
            logits: Tensor = model(images)
        return logits.float()

    model.eval()
    with torch.no_grad():
        for start in range(0, math.ceil(num_samples / group.world_size), batch):
            if stop():
                model.train()
                return None
            indices = shard[start : start + batch]
            if not len(indices):
                continue
            with turn():
                images, labels = _images(dataset, indices), dataset.test_labels[indices]
                logits = answer(images)
                counts[0] += (logits.argmax(1) == labels).sum()
                counts[1] += len(indices)
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


def _images(dataset: Dataset, indices: Tensor) -> Tensor:
    images = dataset.test_images[indices]
    return normalize(images, mean=dataset.mean, std=dataset.std, channels_last=True, size=dataset.image_size)
