from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from clusterddp.train.data.augment import augment, derive_seed, draw_transforms, normalize, random_bits
from clusterddp.train.data.download import import_torchvision

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
PLAIN = {"mean": (0.0,), "std": (1 / 255,)}  # leaves grey levels as they are


def noise(count: int, *, channels: int = 3, size: int = 32) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, channels, size, size), generator=random, dtype=torch.uint8)


def positions(count: int, *, size: int = 8) -> Tensor:
    """Images whose pixels have their own place: row x size + column."""
    return torch.arange(size * size, dtype=torch.uint8).view(1, 1, size, size).expand(count, -1, -1, -1)


def look(images: Tensor, indices: Tensor, **changes: object) -> Tensor:
    """Draw for all samples up to the last of `indices`, and look at these."""
    drawn: dict[str, Any] = {"mode": "flip_translate", "seed": 3, "epoch": 2}
    drawn |= {key: value for key, value in changes.items() if key in ("mode", "seed", "epoch", "max_shift", "cutout")}
    seen: dict[str, Any] = {"mean": MEAN, "std": STD} | {key: changes[key] for key in changes if key not in drawn}
    count = int(indices.max()) + 1
    transforms = draw_transforms(count, side=images.shape[-1], device=images.device, **drawn)
    return augment(images, indices, transforms, **seen)


def shifts_and_flips(count: int, **changes: object) -> tuple[Tensor, Tensor, Tensor]:
    """Read each sample's shift and flip off its middle, which no reflection reaches (8x8 pixels, shifts up to 2)."""
    seen = look(positions(count), torch.arange(count), **PLAIN, **changes).round().long()
    here, beside = seen[:, 0, 3, 3], seen[:, 0, 3, 4]
    flipped = beside < here
    row, column = here // 8, here % 8
    right = torch.where(flipped, column - 4, 3 - column)
    return 3 - row, right, flipped


def test_a_sample_looks_the_same_in_whichever_batch_it_comes() -> None:
    images, indices = noise(64), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    whole = look(images[indices], indices)
    for world in (1, 2, 4):
        for rank in range(world):
            mine = indices[rank::world]
            assert torch.equal(look(images[mine], mine), whole[rank::world])


@pytest.mark.parametrize(
    ("changes", "sha256"),
    [
        ({}, "9ea5172b387573b92a20e3c938adc2c522423f12cf2ab9773bdeb288356a3255"),
        (
            {"cutout": 5, "epoch": 7, "max_shift": 3},
            "a3b81dc64bb737d22d634ce44fb2a42f0280a953193b6230d61d10ffee2784ed",
        ),
    ],
)
def test_samples_look_as_in_earlier_versions_for_runs_go_on(changes: dict[str, Any], sha256: str) -> None:
    seen = look(positions(256, size=16), torch.arange(256), **PLAIN, **changes)
    assert hashlib.sha256(bytes(seen.round().to(torch.uint8).flatten().tolist())).hexdigest() == sha256


def test_a_batch_takes_few_operations() -> None:
    images, indices = noise(64), torch.arange(64)
    transforms = draw_transforms(64, mode="flip_translate", seed=3, epoch=2, side=32)
    normalize(images, mean=MEAN, std=STD)  # which keeps its constants
    with CountedOperations() as counted:
        augment(images[indices], indices, transforms, mean=MEAN, std=STD, channels_last=True)
    assert counted.number <= 10  # each is a kernel to launch, and a step of the fast net takes 3 ms


class CountedOperations(TorchDispatchMode):
    """Counts what computes something, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (func.is_view or func.overloadpacket.__name__ == "_unsafe_view")
        return func(*args, **(kwargs or {}))


def test_seed_and_epoch_change_what_samples_look_like() -> None:
    images, indices = noise(64), torch.arange(64)
    first = look(images, indices)
    assert torch.equal(look(images, indices), first)
    assert not torch.equal(look(images, indices, seed=4), first)
    assert not torch.equal(look(images, indices, epoch=4), first)


def test_the_global_random_state_is_neither_used_nor_changed() -> None:
    before = torch.get_rng_state()
    look(noise(8), torch.arange(8))
    assert torch.equal(torch.get_rng_state(), before)


def test_shifts_are_uniform_and_independent_of_each_other_and_of_flips() -> None:
    count = 50_000
    down, right, flipped = shifts_and_flips(count)
    cells = (((down + 2) * 5 + right + 2) * 2 + flipped).bincount(minlength=50).double()
    expected = count / 50
    chi_square = float(((cells - expected) ** 2 / expected).sum())
    assert len(cells) == 50
    assert chi_square < 85.4  # 49 degrees of freedom: one run in a thousand lies above


def test_every_sample_is_mirrored_in_exactly_one_of_two_epochs() -> None:
    flips = [shifts_and_flips(1000, epoch=epoch)[2] for epoch in range(4)]
    assert torch.equal(flips[0], ~flips[1])
    assert torch.equal(flips[0], flips[2])
    assert torch.equal(flips[1], flips[3])


def test_shifts_of_neighbouring_epochs_and_samples_are_not_related() -> None:
    first, second = (shifts_and_flips(20_000, epoch=epoch)[0].double() for epoch in (0, 1))
    pairs = (torch.stack((first, second)), torch.stack((first[1:], first[:-1])))
    for pair in pairs:
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.025


def test_a_shift_shows_the_reflected_padding() -> None:
    images, indices = noise(40), torch.arange(40)
    down, right, flipped = shifts_and_flips(40, max_shift=2)
    seen = look(images, indices, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    padded = functional.pad(
        torch.where(flipped.view(-1, 1, 1, 1), images.flip(-1), images).float(), (2,) * 4, "reflect"
    )
    for sample in range(40):
        top, left = 2 - int(down[sample]), 2 - int(right[sample])
        assert torch.equal(seen[sample].round(), padded[sample, :, top : top + 32, left : left + 32])


def test_mode_flip_moves_nothing_and_mode_none_changes_nothing() -> None:
    images, indices = noise(16), torch.arange(16)
    plain = normalize(images, mean=MEAN, std=STD)
    mirrored = look(images, indices, mode="flip")
    assert torch.equal(look(images, indices, mode="none"), plain)
    assert all(
        torch.equal(seen, kept) or torch.equal(seen, kept.flip(-1)) for seen, kept in zip(mirrored, plain, strict=True)
    )


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="cutout"):
        look(noise(1), torch.arange(1), mode="cutout")


def test_normalised_pixels_have_the_layout_that_was_asked_for() -> None:
    images = noise(4)
    seen = normalize(images, mean=MEAN, std=STD, channels_last=True)
    expected = (images.double() / 255 - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    assert seen.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(normalize(images, mean=MEAN, std=STD).double(), expected, atol=1e-5, rtol=1e-5)


def test_normalising_does_not_touch_the_data_set() -> None:
    images = noise(2)
    before = images.clone()
    normalize(images, mean=MEAN, std=STD)
    look(images, torch.arange(2))
    assert torch.equal(images, before)


def test_random_bits_are_spread_evenly_and_differ_for_every_index() -> None:
    bits = random_bits(torch.arange(1 << 16), seed=0, stream=0)
    ones = torch.stack([(bits >> place & 1).double().mean() for place in range(32)])
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 32
    assert len(bits.unique()) == 1 << 16
    assert float((ones - 0.5).abs().max()) < 0.01


def test_one_changed_bit_of_the_index_changes_half_of_the_random_bits() -> None:
    indices = torch.arange(4096)
    for place in range(16):
        changed = random_bits(indices, seed=9, stream=1) ^ random_bits(indices ^ (1 << place), seed=9, stream=1)
        flips = torch.stack([(changed >> bit & 1).double().mean() for bit in range(32)])
        assert float((flips - 0.5).abs().max()) < 0.06


def test_derived_seeds_are_their_own_for_every_place() -> None:
    seeds = {derive_seed(seed, stream, epoch) for seed in range(10) for stream in range(4) for epoch in range(50)}
    assert len(seeds) == 2000
    assert derive_seed(1, 2) != derive_seed(2, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_augments_as_the_cpu_does() -> None:
    images, indices = noise(64), torch.arange(64)
    assert torch.equal(look(images.cuda(), indices.cuda()).cpu(), look(images, indices))


# -- enlarged


def test_small_images_are_enlarged_as_torchvision_does_it() -> None:
    resize = import_torchvision().transforms.functional.resize
    images = noise(3, size=24)
    theirs = resize(normalize(images, mean=MEAN, std=STD), [56, 56], antialias=True)
    ours = normalize(images, mean=MEAN, std=STD, size=56, channels_last=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ours.is_contiguous(memory_format=torch.channels_last)


def test_an_enlarged_sample_looks_the_same_in_whichever_batch_it_comes() -> None:
    images, indices = noise(8, size=24), torch.arange(8)
    whole = look(images, indices, cutout=6, size=56)
    assert tuple(whole.shape) == (8, 3, 56, 56)
    for mine in (indices[1::2], indices[:1]):
        assert torch.equal(look(images[mine], mine, cutout=6, size=56), whole[mine])


# -- cutout


def blanked(count: int, side: int, **changes: object) -> Tensor:
    """Return which pixels of `count` images without a zero were blanked (bool, [count, row, column])."""
    images = torch.full((count, 1, 8, 8), 200, dtype=torch.uint8)
    return look(images, torch.arange(count), mode="none", cutout=side, **PLAIN, **changes)[:, 0] == 0


def test_cutout_blanks_one_whole_square_in_each_image() -> None:
    mask = blanked(200, 3)
    rows, columns = mask.any(2), mask.any(1)
    assert mask.sum((1, 2)).tolist() == [9] * 200
    assert rows.sum(1).tolist() == columns.sum(1).tolist() == [3] * 200


def test_cutout_is_as_often_at_each_place() -> None:
    corners = blanked(36_000, 3).flatten(1).float().argmax(1)
    places = corners.bincount(minlength=64).view(8, 8)[:6, :6]
    assert places.sum().item() == 36_000
    assert float(((places - 1000.0) ** 2 / 1000).sum()) < 66.6  # 35 degrees of freedom, one run in a thousand


def test_cutout_is_another_one_in_each_epoch_and_the_same_in_any_batch() -> None:
    whole = blanked(64, 3)
    assert torch.equal(blanked(64, 3), whole)
    assert not torch.equal(blanked(64, 3, epoch=3), whole)
    indices = torch.arange(63, -1, -1)
    images = torch.full((64, 1, 8, 8), 200, dtype=torch.uint8)
    assert torch.equal(look(images, indices, mode="none", cutout=3, **PLAIN)[:, 0].eq(0).flip(0), whole)


def test_cutout_comes_on_top_and_leaves_the_rest_as_it_was() -> None:
    images, indices = noise(16), torch.arange(16)
    plain, cut = look(images, indices), look(images, indices, cutout=9)
    gone = (plain != cut).any(1, keepdim=True).expand_as(cut)
    assert not cut[gone].any()


def test_images_move_as_far_as_the_largest_shift() -> None:
    down, right, _ = shifts_and_flips(500, max_shift=1)
    assert set(down.tolist()) == set(right.tolist()) == {-1, 0, 1}
    moved = look(noise(64), torch.arange(64), max_shift=31)
    assert moved.shape == (64, 3, 32, 32)
