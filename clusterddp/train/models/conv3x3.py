"""A 3x3 convolution that is fast over maps of a few pixels, too, on CPUs with avx512_bf16 and without AMX.

There oneDNN (that of torch 2.13) has no kernels for such maps in bf16. In the last layers of a net for small images the
border takes half of its time and more; the gradient of the weights is worst. Here that gradient is nine matrix
products, one for each place in the kernel, over the pixels under that place. 2 cores of AMD EPYC, 128 images, 512
channels: 1.5 ms for 9.1 ms at 2x2 pixels, 8.2 for 16 at 4x4; 125 images, 384 channels: 2.5 ms for 8.1 at 3x3, 17 for 23
at 7x7. At 8x8 it gains nothing, nor does it in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from clusterddp.train.device import cpu_bf16_units

_BY_PRODUCTS_AT_MOST = 7  # pixels a side
_CHANNELS_FIRST_AT_MOST = 4  # pixels a side: 7.8 ms for 12.6 forward at 4x4, and as much backward


class Conv3x3(nn.Conv2d):
    """A convolution with a 3x3 kernel, a border of zeros, and no bias."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int = 1) -> None:
        super().__init__(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, channels_in, h, w] to [batch, channels_out, h / stride, w / stride]."""
        if self.stride != (1, 1) or max(x.shape[2:]) > _BY_PRODUCTS_AT_MOST or not _has_slow_kernels(x):
            return super().forward(x)
        x, weight = x.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        y: Tensor = SmallMaps.apply(x, weight)  # type: ignore[no-untyped-call]
        return y


class SmallMaps(torch.autograd.Function):
    """A 3x3 convolution with stride 1 and a border of zeros, the gradient of its weights by matrix products.

    Inputs and outputs are channels last: other layers take many times as long on mixed layouts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Map [batch, channels_in, h, w] and [channels_out, channels_in, 3, 3] to [batch, channels_out, h, w]."""
        layout = _faster_layout(x)
        weight = weight.contiguous(memory_format=layout)
        ctx.save_for_backward(x, weight)
        x = x.contiguous(memory_format=layout)
        return torch.conv2d(x, weight, padding=1).contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `x` and of `weight`, where they are wanted."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        return (
            _gradient_of_maps(x, weight, grad) if wants_x else None,
            _gradient_of_weight(x, grad) if wants_weight else None,
        )


def _gradient_of_maps(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    grad = grad.contiguous(memory_format=_faster_layout(x))
    wanted: Tensor = conv2d_input(x.shape, weight, grad, padding=1)  # type: ignore[no-untyped-call]
    return wanted.contiguous(memory_format=torch.channels_last)


def _gradient_of_weight(x: Tensor, grad: Tensor) -> Tensor:
    """Return [channels_out, channels_in, 3, 3], channels last."""
    pixels, grads = (tensor.permute(2, 3, 0, 1).contiguous() for tensor in (x, grad))  # [h, w, batch, channel]
    height, width = x.shape[2:]
    weight = x.new_empty(grad.shape[1], 3, 3, x.shape[1])
    for row in range(3):
        for column in range(3):
            (here_y, there_y), (here_x, there_x) = _overlap(row - 1, height), _overlap(column - 1, width)
            left, right = grads[here_y, here_x].flatten(0, 2), pixels[there_y, there_x].flatten(0, 2)
            torch.mm(left.T, right, out=weight[:, row, column])
    return weight.permute(0, 3, 1, 2)


def _faster_layout(x: Tensor) -> torch.memory_format:
    return torch.contiguous_format if max(x.shape[2:]) <= _CHANNELS_FIRST_AT_MOST else torch.channels_last


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Return which pixels have one within the map that is `shift` further, and which these are."""
    return slice(max(0, -shift), size - max(0, shift)), slice(max(0, shift), size + min(0, shift))


def _has_slow_kernels(x: Tensor) -> bool:
    """Return whether `x` is convolved in bf16, uncompiled, by a CPU with avx512_bf16 and without AMX."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and cpu_bf16_units() == (True, False)
    )
