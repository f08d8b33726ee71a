from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from clusterddp.train.models.convolution import (
    NATIVE,
    PASSES,
    Conv,
    Shape,
    Ways,
    choose_ways,
    shapes_of,
    time_ways,
)
from clusterddp.train.models.fastnet import FastNet
from clusterddp.train.models.resnet import ResNet18

SHAPES: list[Shape] = [
    (5, 3, 1, 1, 4, 3, 1),
    (5, 3, 1, 5, 4, 3, 1),
    (5, 3, 6, 2, 4, 3, 1),
    (5, 3, 7, 7, 4, 3, 1),
    (5, 3, 7, 8, 4, 3, 2),
    (5, 3, 8, 8, 4, 1, 2),
    (5, 3, 8, 8, 4, 1, 1),
    (2, 3, 20, 19, 4, 7, 2),
]
ONLY_STRIDE_1 = {(1, "columns"), (2, "places")}


def every_way(stride: int) -> list[Ways]:
    """Each way of each pass, the other passes native."""
    found = []
    for which, ways in enumerate(PASSES):
        for name in ways:
            if stride == 1 or (which, name) not in ONLY_STRIDE_1:
                found.append((*NATIVE[:which], name, *NATIVE[which + 1 :]))
    return found  # type: ignore[return-value]


def drawn(shape: Shape, dtype: torch.dtype) -> tuple[Conv, Tensor]:
    batch, channels, height, width, out, kernel, stride = shape
    torch.manual_seed(0)
    conv = Conv(channels, out, kernel, stride=stride).to(dtype)
    x = torch.randn(batch, channels, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return conv.to(memory_format=torch.channels_last), x  # type: ignore[call-overload]


def passes(conv: Conv, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of the input and of the weights for a fixed gradient of the output."""
    x = x.detach().requires_grad_()
    y = conv(x)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return (y.detach(), *torch.autograd.grad(y, (x, conv.weight), grad.contiguous(memory_format=torch.channels_last)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_computes_what_torch_does(shape: Shape) -> None:
    conv, x = drawn(shape, torch.float64)
    expected = passes(conv, x)
    for conv.ways in every_way(shape[-1]):
        found = passes(conv, x)
        torch.testing.assert_close(found, expected)
        assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in found)


@pytest.mark.parametrize("shape", [(32, 64, 4, 4, 64, 3, 1), (32, 64, 7, 7, 48, 3, 1), (32, 64, 8, 8, 96, 3, 2)])
def test_no_way_in_bf16_is_further_from_fp32_than_torchs(shape: Shape) -> None:
    conv, x = drawn(shape, torch.float32)
    exact = passes(conv, x)

    def errors() -> list[float]:
        with torch.autocast("cpu", torch.bfloat16):
            found = passes(conv, x)
        assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]
        return [float((near.float() - far).norm() / far.norm()) for near, far in zip(found, exact, strict=True)]

    native = errors()
    for conv.ways in every_way(shape[-1]):
        assert all(error <= 1.1 * least for error, least in zip(errors(), native, strict=True)), conv.ways


def test_native_is_torchs_to_the_last_bit() -> None:
    conv, x = drawn((2, 4, 4, 4, 8, 3, 1), torch.float32)
    assert conv.ways == NATIVE
    assert torch.equal(conv(x), functional.conv2d(x, conv.weight, padding=1))


def test_weights_can_be_frozen_and_the_input_can_be_the_image() -> None:
    conv, x = drawn((2, 3, 4, 4, 5, 3, 1), torch.float32)
    conv.ways = ("columns", "columns", "places")
    conv(x).sum().backward()
    assert conv.weight.grad is not None
    conv.weight.requires_grad_(False)
    conv(x.requires_grad_()).sum().backward()
    assert x.grad is not None


def test_the_shapes_of_a_net_are_found_and_the_net_stays_as_it_was() -> None:
    model = ResNet18().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = shapes_of(model, torch.zeros(128, 3, 32, 32))
    assert len(shapes) == 20
    assert shapes["conv1"] == (128, 3, 32, 32, 64, 3, 1)
    assert shapes["layer4.0.conv1"] == (128, 256, 8, 8, 512, 3, 2)
    assert shapes["layer4.0.downsample.0"] == (128, 256, 8, 8, 512, 1, 2)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert len(shapes_of(FastNet(), torch.zeros(500, 3, 32, 32))) == 6


def test_what_is_not_timed_stays_native() -> None:
    shapes: list[Shape] = [(8, 16, 8, 8, 16, 3, 1), (8, 16, 2, 2, 16, 3, 1)]
    rows = time_ways(shapes, torch.float32, seconds=0)
    assert all(math.isinf(seconds) for row in rows for seconds in row)
    assert [choose_ways(row) for row in rows] == [NATIVE, NATIVE]


def test_each_way_is_timed_that_a_shape_has() -> None:
    (row, strided) = time_ways([(8, 16, 2, 2, 16, 3, 1), (8, 16, 4, 4, 16, 3, 2)], torch.float32, seconds=60)
    assert all(seconds > 0 and math.isfinite(seconds) for seconds in row)
    names = [(which, name) for which, ways in enumerate(PASSES) for name in ways]
    assert {name for name, seconds in zip(names, strided, strict=True) if math.isinf(seconds)} == ONLY_STRIDE_1


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ([10, 9.5, 12, 10, 20, 30, 10, 11, 9.1], NATIVE),
        ([10, 8.0, 7.0, 10, 20, 8.9, 10, 5.0, 4.0], ("columns", "columns", "places")),
        ([10, 8.0, math.inf, 10, math.inf, math.inf, 10, 5.0, math.inf], ("channels first", "native", "columns")),
        ([math.inf] * 9, NATIVE),
    ],
)
def test_the_fastest_way_is_taken_and_what_gains_less_than_a_tenth_is_not(row: list[float], chosen: Ways) -> None:
    assert choose_ways(row) == chosen
