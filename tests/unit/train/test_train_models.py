from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.augment import augment, draw_transforms, normalize
from clusterddp.train.data.dataset import Dataset, batch_indices, epoch_order, load_dataset
from clusterddp.train.data.download import import_torchvision
from clusterddp.train.models import _some_images, build_model
from clusterddp.train.models.fastnet import BiasBatchNorm, FastNet
from clusterddp.train.models.resnet import ResNet18

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other on a busy machine, for longer than one computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shapes(samples: int) -> Dataset:
    return load_dataset(TrainSpec(dataset="shapes", samples=samples))


def grey(dataset: Dataset) -> Dataset:
    """The same set as Fashion-MNIST has it: one channel."""
    return Dataset(
        label="grey",
        train_images=dataset.train_images[:, :1],
        train_labels=dataset.train_labels,
        test_images=dataset.test_images[:, :1],
        test_labels=dataset.test_labels,
        num_classes=dataset.num_classes,
        image_size=dataset.image_size,
        mean=dataset.mean[:1],
        std=dataset.std[:1],
    )


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_resnet18_has_11173962_parameters() -> None:
    assert parameter_count(ResNet18(channels=3, num_classes=10)) == 11_173_962


def test_resnet18_for_large_images_is_torchvisions() -> None:
    theirs = import_torchvision().models.resnet18().eval()
    ours = ResNet18(num_classes=1000, large_stem=True).eval()
    ours.load_state_dict(theirs.state_dict())
    assert parameter_count(ours) == 11_689_512
    images = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(ours(images), theirs(images))


def test_the_first_layers_of_resnet18_follow_from_the_size_of_the_images() -> None:
    spec = TrainSpec(dataset="shapes", samples=10)
    kernels = {}
    for side in (64, 65):
        dataset = dataclasses.replace(shapes(10), image_size=side)
        kernels[side] = build_model(spec, dataset).get_parameter("conv1.weight").shape[2]
    assert kernels == {64: 3, 65: 7}


def test_resnet18_has_torchvisions_names_and_shapes_but_for_stem_and_head() -> None:
    torchvision = import_torchvision()
    ours = {name: tuple(value.shape) for name, value in ResNet18().state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in torchvision.models.resnet18().state_dict().items()}
    changed = {name for name in ours if ours[name] != theirs.get(name)}
    assert ours.keys() == theirs.keys()
    assert changed == {"conv1.weight", "fc.weight", "fc.bias"}


def test_resnet18_starts_with_he_normal_convolutions_and_plain_batch_norm() -> None:
    torch.manual_seed(0)
    model = ResNet18()
    weight = model.layer4[0].conv1.weight
    expected = (2 / (512 * 9)) ** 0.5
    assert abs(float(weight.detach().std()) / expected - 1) < 0.01
    assert all(
        bool((module.weight == 1).all() and (module.bias == 0).all())
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
    )


def test_resnet18_keeps_the_resolution_through_its_stem() -> None:
    model = ResNet18().eval()
    sizes: list[tuple[int, ...]] = []
    model.layer1.register_forward_hook(lambda _module, _inputs, output: sizes.append(tuple(output.shape)))
    model.layer4.register_forward_hook(lambda _module, _inputs, output: sizes.append(tuple(output.shape)))
    logits = model(torch.zeros(2, 3, 32, 32))
    assert sizes == [(2, 64, 32, 32), (2, 512, 4, 4)]
    assert tuple(logits.shape) == (2, 10)


def test_a_model_depends_on_the_seed_and_not_on_the_global_random_state() -> None:
    dataset = shapes(100)
    for name in ("resnet18", "fastnet"):
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = build_model(TrainSpec(model=name, seed=5), dataset).state_dict()
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        again = build_model(TrainSpec(model=name, seed=5), dataset).state_dict()
        other = build_model(TrainSpec(model=name, seed=6), dataset).state_dict()
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)


def test_models_take_one_channel_too() -> None:
    dataset = grey(shapes(100))
    batch = normalize(dataset.train_images[:4], mean=dataset.mean, std=dataset.std)
    for name in ("resnet18", "fastnet"):
        assert tuple(build_model(TrainSpec(model=name), dataset)(batch).shape) == (4, 10)


def test_width_multiplies_the_channels_of_fastnet() -> None:
    assert parameter_count(FastNet(width=1.0)) == 1_972_792
    assert FastNet(width=0.25).head.weight.shape == (10, 64)
    assert FastNet(width=0.5).group1.conv1.weight.shape[0] == 32


@pytest.mark.parametrize("name", ["resnet18", "fastnet"])
def test_a_new_model_holds_all_classes_equally_likely(name: str) -> None:
    """A net that begins sure of wrong answers first unlearns them: over 8 epochs that cost fastnet 1.5 points."""
    dataset = shapes(200)
    model = build_model(TrainSpec(model=name), dataset)
    images = normalize(dataset.train_images, mean=dataset.mean, std=dataset.std)
    with torch.no_grad():
        loss = float(functional.cross_entropy(model(images), dataset.train_labels))
    assert loss == pytest.approx(math.log(dataset.num_classes), rel=0.25)


def test_the_whitening_makes_patches_uncorrelated_with_unit_variance() -> None:
    dataset = shapes(500)
    model = build_model(TrainSpec(model="fastnet"), dataset)
    assert isinstance(model, FastNet)
    images = normalize(dataset.train_images, mean=dataset.mean, std=dataset.std)
    patterns = functional.conv2d(images, model.whiten.weight)[:, :12].transpose(0, 1).flatten(1)
    covariance = patterns @ patterns.T / patterns.shape[1]
    unrelated = covariance - torch.diag(covariance.diagonal())
    assert float(unrelated.abs().max()) < 1e-3
    assert bool(((covariance.diagonal() > 0.8) & (covariance.diagonal() < 1.001)).all())


def test_the_whitening_has_both_signs_and_is_frozen() -> None:
    model = build_model(TrainSpec(model="fastnet"), shapes(100))
    assert isinstance(model, FastNet)
    weight = model.whiten.weight
    assert torch.equal(weight[:12], -weight[12:])
    assert not weight.requires_grad
    assert model.whiten.bias is not None
    assert model.whiten.bias.requires_grad


def test_fastnets_convolutions_start_by_passing_their_inputs_on() -> None:
    convolution = FastNet(width=0.5).group2.conv1
    x = torch.rand(1, 32, 8, 8)
    assert torch.equal(convolution(x)[:, :32], x)


def test_a_state_dict_brings_the_whitening_along() -> None:
    dataset = shapes(100)
    trained = build_model(TrainSpec(model="fastnet", width=0.25), dataset)
    fresh = FastNet(width=0.25)
    fresh.load_state_dict(trained.state_dict())
    batch = normalize(dataset.test_images, mean=dataset.mean, std=dataset.std)
    assert torch.equal(fresh.eval()(batch), trained.eval()(batch))


def test_the_bias_of_fastnets_batch_norm_learns_64_times_as_fast() -> None:
    ours, plain = BiasBatchNorm(4), nn.BatchNorm2d(4)
    x = torch.randn(8, 4, 5, 5)
    target = torch.randn(8, 4, 5, 5)
    for norm in (ours, plain):
        functional.mse_loss(norm(x), target).backward()
    effective_step = ours.bias.grad * 8  # what is added is bias x 8; in units of the learning rate
    torch.testing.assert_close(effective_step, plain.bias.grad * 64)
    assert not ours.weight.requires_grad


def test_fastnets_batch_norm_records_the_batches_statistics() -> None:
    norm = BiasBatchNorm(4)
    x = torch.randn(64, 4, 5, 5) * 3 + 2
    for _ in range(20):
        norm(x)
    norm.eval()
    seen = norm(x).detach()
    assert abs(float(seen.mean())) < 1e-3
    assert abs(float(seen.std()) - 1) < 1e-3
    assert int(norm.num_batches_tracked) == 20


def test_models_run_in_channels_last_and_bf16() -> None:
    dataset = shapes(100)
    model = build_model(TrainSpec(model="fastnet", width=0.25), dataset).to(memory_format=torch.channels_last)
    batch = normalize(dataset.train_images[:8], mean=dataset.mean, std=dataset.std, channels_last=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    logits.float().sum().backward()
    assert bool(logits.isfinite().all())


def test_fastnet_learns_shapes_within_a_few_seconds() -> None:
    spec = TrainSpec(model="fastnet", dataset="shapes", samples=2000, width=0.25, batch_size=50, epochs=3)
    dataset = load_dataset(spec)
    model = build_model(spec, dataset).to(memory_format=torch.channels_last)
    train_briefly(model, dataset, spec)
    model.eval()
    with torch.no_grad():
        logits = model(normalize(dataset.test_images, mean=dataset.mean, std=dataset.std, channels_last=True))
    accuracy = float((logits.argmax(1) == dataset.test_labels).double().mean())
    assert accuracy > 0.8


def train_briefly(model: nn.Module, dataset: Dataset, spec: TrainSpec) -> None:
    n = len(dataset.train_labels)
    steps = n // spec.batch_size
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, spec.epochs * steps, pct_start=0.2)
    for epoch in range(spec.epochs):
        order = epoch_order(n, spec.seed, epoch)
        for step in range(steps):
            indices = batch_indices(order, step * spec.batch_size, world=1, rank=0, batch_size=spec.batch_size, micro=0)
            loss = functional.cross_entropy(
                model(augmented(dataset, indices, spec, epoch)), dataset.train_labels[indices], label_smoothing=0.1
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def augmented(dataset: Dataset, indices: Tensor, spec: TrainSpec, epoch: int) -> Tensor:
    transforms = draw_transforms(len(dataset.train_labels), mode=spec.augment, seed=spec.seed, epoch=epoch, side=32)
    images = dataset.train_images[indices]
    return augment(images, indices, transforms, mean=dataset.mean, std=dataset.std, channels_last=True)


def test_a_set_that_lies_class_by_class_is_whitened_by_images_of_all_its_classes() -> None:
    images = torch.arange(250, dtype=torch.uint8).repeat_interleave(40).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    ordered = SimpleNamespace(train_images=images, train_labels=torch.arange(10).repeat_interleave(1000))
    taken = _some_images(ordered)  # type: ignore[arg-type]
    assert len(taken) == 2000
    assert taken[:, 0, 0, 0].unique().tolist() == list(range(250))
    mixed = SimpleNamespace(train_images=images, train_labels=torch.arange(10).repeat(1000))
    assert _some_images(mixed).equal(images[:2000])  # type: ignore[arg-type]
