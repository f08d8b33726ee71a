"""A convolution of which each pass is computed in the way that is fastest on this CPU; `time_ways` measures them.

torch's own (oneDNN's) is best over large maps. Over the few pixels of a net's last layers the border takes half of its
time, and its gradient of the weights is slow with AMX and without it; there a matrix product over unfolded pixels or
one product for each place in the kernel takes as little as a quarter of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

Ways = tuple[str, str, str]
"""How the output, the gradient of the input and the gradient of the weights are computed, by names in `PASSES`."""
Shape = tuple[int, int, int, int, int, int, int]
"""Batch, channels in, height, width, channels out, side of the kernel, stride."""

NATIVE: Ways = ("native", "native", "native")
_TRIALS = 3
_HOPELESS = 1.5  # a way that takes so many times native's time at the first trial is not tried again
_WORTH_IT = 0.9  # of native's time: what gains less is noise


class Conv(nn.Conv2d):
    """A convolution with a square kernel of an odd side, a border of zeros that keeps the size, and no bias."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int = 3, *, stride: int = 1) -> None:
        super().__init__(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.ways = NATIVE

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, channels_in, h, w] to [batch, channels_out, h / stride, w / stride], rounded up."""
        if self.ways == NATIVE:
            return super().forward(x)
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):  # which casts no arguments of a Function
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        y: Tensor = _Convolution.apply(x, weight, self.stride[0], self.ways)  # type: ignore[no-untyped-call]
        return y


class _Convolution(torch.autograd.Function):
    """Inputs and outputs are channels last: other layers take many times as long on mixed layouts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, ways: Ways) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.ways = stride, ways
        return _compute(PASSES[0][ways[0]], x, weight, x, stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        return (
            _compute(PASSES[1][ctx.ways[1]], x, weight, grad, ctx.stride) if wants_x else None,
            _compute(PASSES[2][ctx.ways[2]], x, weight, grad, ctx.stride) if wants_weight else None,
            None,
            None,
        )


def _compute(way: _Pass, x: Tensor, weight: Tensor, grad: Tensor, stride: int) -> Tensor:
    return way(x, weight, grad, stride).contiguous(memory_format=torch.channels_last)


def _output(x: Tensor, weight: Tensor, _: Tensor, stride: int) -> Tensor:
    return functional.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)


def _input(x: Tensor, weight: Tensor, grad: Tensor, stride: int) -> Tensor:
    padding = weight.shape[2] // 2
    return conv2d_input(x.shape, weight, grad, stride=stride, padding=padding)  # type: ignore[no-untyped-call,no-any-return]


def _weight(x: Tensor, weight: Tensor, grad: Tensor, stride: int) -> Tensor:
    padding = weight.shape[2] // 2
    return conv2d_weight(x, weight.shape, grad, stride=stride, padding=padding)  # type: ignore[no-untyped-call,no-any-return]


def _channels_first(native: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> _Pass:
    return lambda x, weight, grad, stride: native(x.contiguous(), weight.contiguous(), grad.contiguous(), stride)


def _output_by_columns(x: Tensor, weight: Tensor, _: Tensor, stride: int) -> Tensor:
    columns = _unfold(x, weight.shape[2], stride)
    product = columns.flatten(0, 2) @ weight.permute(2, 3, 1, 0).flatten(0, 2)
    return product.view(*columns.shape[:3], -1).permute(0, 3, 1, 2)


def _input_by_columns(x: Tensor, weight: Tensor, grad: Tensor, stride: int) -> Tensor:
    return _output_by_columns(grad, weight.flip(2, 3).transpose(0, 1), x, stride)


def _weight_by_columns(x: Tensor, weight: Tensor, grad: Tensor, stride: int) -> Tensor:
    columns = _unfold(x, weight.shape[2], stride)
    product = grad.permute(0, 2, 3, 1).flatten(0, 2).T @ columns.flatten(0, 2)
    return product.view(weight.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)


def _unfold(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Return [batch, h / stride, w / stride, kernel * kernel * channel]: the pixels under the kernel, at each place."""
    border = kernel // 2
    padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, border, border, border, border))
    return padded.unfold(1, kernel, stride).unfold(2, kernel, stride).permute(0, 1, 2, 4, 5, 3).flatten(3)


def _weight_by_places(x: Tensor, weight: Tensor, grad: Tensor, _: int) -> Tensor:
    pixels, grads = (tensor.permute(2, 3, 0, 1).contiguous() for tensor in (x, grad))  # [h, w, batch, channel]
    height, width = x.shape[2:]
    channels_out, channels_in, kernel = weight.shape[:3]
    found = x.new_empty(channels_out, kernel, kernel, channels_in)
    for row in range(kernel):
        for column in range(kernel):
            here_y, there_y = _overlap(row - kernel // 2, height)
            here_x, there_x = _overlap(column - kernel // 2, width)
            left, right = grads[here_y, here_x].flatten(0, 2), pixels[there_y, there_x].flatten(0, 2)
            torch.mm(left.T, right, out=found[:, row, column])
    return found.permute(0, 3, 1, 2)


def _overlap(shift: int, size: int) -> tuple[slice, slice]:
    """Return which pixels have one within the map that is `shift` further, and which these are."""
    return slice(max(0, -shift), max(0, size - max(0, shift))), slice(max(0, shift), max(0, size + min(0, shift)))


_Pass = Callable[[Tensor, Tensor, Tensor, int], Tensor]
PASSES: tuple[Mapping[str, _Pass], ...] = (
    {"native": _output, "channels first": _channels_first(_output), "columns": _output_by_columns},
    {"native": _input, "channels first": _channels_first(_input), "columns": _input_by_columns},
    {"native": _weight, "columns": _weight_by_columns, "places": _weight_by_places},
)
"""The ways to compute the output, the gradient of the input, that of the weights, of (x, weight, gradient, stride)."""
_STRIDE_1 = {(1, "columns"), (2, "places")}


def shapes_of(model: nn.Module, images: Tensor) -> dict[str, Shape]:
    """Return what each `Conv` of `model` convolves when it trains on `images` [batch, channel, h, w], by its name.

    `model` is evaluated on one image, which changes nothing in it.
    """
    convs = {module: name for name, module in model.named_modules() if isinstance(module, Conv)}
    found: dict[str, Shape] = {}

    def note(conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(conv, Conv)
        channels, height, width = inputs[0].shape[1:]
        kernel, stride = conv.kernel_size[0], conv.stride[0]
        found[convs[conv]] = (len(images), channels, height, width, conv.out_channels, kernel, stride)

    hooks = [conv.register_forward_pre_hook(note) for conv in convs]
    was_training = model.training
    with torch.no_grad():
        model.eval()(images[:1])
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return found


def time_ways(shapes: Iterable[Shape], dtype: torch.dtype, *, seconds: float) -> list[list[float]]:
    """Time each way of each pass of each shape, in the order of `PASSES`; a row of seconds per shape.

    The trials of a pass alternate, so that other load slows all; the shortest counts. The smallest maps come first,
    since they gain most; what is not timed within `seconds` is infinite.
    """
    rows = {shape: [math.inf] * sum(map(len, PASSES)) for shape in shapes}
    deadline = time.perf_counter() + seconds
    for shape in sorted(rows, key=lambda shape: shape[2] * shape[3]):
        _time_shape(shape, dtype, rows[shape], deadline)
    return list(rows.values())


def _time_shape(shape: Shape, dtype: torch.dtype, times: list[float], deadline: float) -> None:
    batch, channels, height, width, out, kernel, stride = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        tensor = torch.randn(size, generator=generator).to(dtype)
        return tensor.contiguous(memory_format=torch.channels_last)

    x, weight = draw(batch, channels, height, width), draw(out, channels, kernel, kernel)
    grad = draw(batch, out, -(-height // stride), -(-width // stride))
    at = 0
    for which, ways in enumerate(PASSES):
        tried = {name: way for name, way in ways.items() if stride == 1 or (which, name) not in _STRIDE_1}
        best = dict.fromkeys(tried, math.inf)
        for _ in range(_TRIALS):
            for name in list(tried):
                began = time.perf_counter()
                if began > deadline:
                    return
                _compute(tried[name], x, weight, grad, stride)
                best[name] = min(best[name], time.perf_counter() - began)
            tried = {name: way for name, way in tried.items() if best[name] <= _HOPELESS * best["native"]}
        for place, name in enumerate(ways):
            times[at + place] = best.get(name, math.inf)
        at += len(ways)


def choose_ways(times: list[float]) -> Ways:
    """Return the fastest way of each pass by a row of `time_ways`; native where it is as fast within noise."""
    chosen, left = [], iter(times)
    for ways in PASSES:
        seconds = {name: next(left) for name in ways}
        best = min(seconds, key=seconds.__getitem__)
        chosen.append(best if seconds[best] < _WORTH_IT * seconds["native"] < math.inf else "native")
    return chosen[0], chosen[1], chosen[2]
