"""A small net that learns 32x32 images in a few epochs: whitened patches, identity-like convolutions, max-pools.

2.0 million parameters at width 1. Source of the ideas: Keller Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU"
(2024, arXiv:2404.00498) and its code, airbench94; whitening and frozen scales go back to David Page's series "How to
train your ResNet" (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from clusterddp.train.models.convolution import Conv

_WHITEN_KERNEL = 2
_WHITEN_EPS = 5e-4  # added to the variances: keeps the faintest patch patterns from being blown up. Source: airbench94
_LOGIT_SCALE = 1 / 9  # Source: airbench94
_BIAS_GAIN = 8.0  # batch norm's bias learns 8^2 = 64 times as fast as the weights. Source: airbench94
_BATCH_NORM_MOMENTUM = 0.4  # few steps, moving fast: statistics of the last handful of batches. Source: airbench94
_BATCH_NORM_EPS = 1e-5


class FastNet(nn.Module):
    """A frozen layer that whitens 2x2 patches, three groups of two 3x3 convolutions, one linear layer.

    `width` multiplies the channels of the groups (64, 256, 256 at 1). Images are 32x32. Call `whiten_patches` once
    before training; a loaded state dict brings the whitening along.
    """

    def __init__(self, *, channels: int = 3, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        patterns = 2 * channels * _WHITEN_KERNEL**2
        narrow, wide = max(8, round(64 * width)), max(8, round(256 * width))
        self.whiten = nn.Conv2d(channels, patterns, _WHITEN_KERNEL)
        self.whiten.weight.requires_grad_(False)
        self.group1 = ConvGroup(patterns, narrow)
        self.group2 = ConvGroup(narrow, wide)
        self.group3 = ConvGroup(wide, wide)
        self.head = nn.Linear(wide, num_classes, bias=False)
        if self.whiten.bias is not None:
            nn.init.zeros_(self.whiten.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [batch, class] of normalised images [batch, channel, 32, 32]."""
        x = functional.gelu(self.whiten(images))
        x = self.group3(self.group2(self.group1(x)))
        logits: Tensor = self.head(functional.max_pool2d(x, 3).flatten(1))
        return logits * _LOGIT_SCALE

    @torch.no_grad()
    def whiten_patches(self, images: Tensor) -> None:
        """Set the first layer so that its outputs over `images` are uncorrelated, each pattern with both signs.

        images: float, normalised, [n, channel, height, width].
        """
        channels, kernel = images.shape[1], _WHITEN_KERNEL
        patches = images.unfold(2, kernel, 1).unfold(3, kernel, 1).permute(0, 2, 3, 1, 4, 5)
        patches = patches.reshape(-1, channels * kernel * kernel)
        covariance = (patches.T @ patches).double() / len(patches)
        variances, patterns = torch.linalg.eigh(covariance)
        filters = (patterns / torch.sqrt(variances + _WHITEN_EPS)).T.reshape(-1, channels, kernel, kernel)
        self.whiten.weight.copy_(torch.cat((filters, -filters)))


class ConvGroup(nn.Module):
    """Convolution, 2x2 max-pool, batch norm, GELU; convolution, batch norm, GELU."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = _dirac_conv(channels_in, channels_out)
        self.norm1 = BiasBatchNorm(channels_out)
        self.conv2 = _dirac_conv(channels_out, channels_out)
        self.norm2 = BiasBatchNorm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, channels_in, h, w] to [batch, channels_out, h // 2, w // 2]."""
        x = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(x), 2)))
        return functional.gelu(self.norm2(self.conv2(x)))


class BiasBatchNorm(nn.BatchNorm2d):
    """Batch norm whose scale is frozen at one and whose bias learns faster than the other parameters.

    The bias is kept divided by `_BIAS_GAIN`: for SGD that is the same as a learning rate times the gain's square on the
    plain bias, with the same weight decay, for every optimizer.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=_BATCH_NORM_EPS, momentum=_BATCH_NORM_MOMENTUM)
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [batch, channel, h, w]; in training by the batch's statistics, which are also recorded."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias * _BIAS_GAIN,
            training=self.training,
            momentum=_BATCH_NORM_MOMENTUM,
            eps=self.eps,
        )


def _dirac_conv(channels_in: int, channels_out: int) -> Conv:
    """Return a 3x3 convolution whose first `channels_in` outputs start as copies of the inputs."""
    conv = Conv(channels_in, channels_out)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:channels_in])
    return conv
