"""Test-time augmentation: the mean answer over several views of an image. It is told apart from the plain accuracy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def mean_logits(answer: Callable[[Tensor], Tensor], images: Tensor, plain: Tensor, *, tta: str) -> Tensor:
    """Return the mean of `answer`, a model's logits, over the views that `tta` names (mirror, mirror_translate).

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
