"""The rules between the values of a spec's `train` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clusterddp.spec.image_sets import BUILT_IN, FOLDER, IMAGE_SETS, fits_fastnet, kept_side, own_side
from clusterddp.spec.section import Conflict

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec
    from clusterddp.spec.train import TrainSpec


def train_conflicts(train: TrainSpec, job: JobSpec) -> Iterator[Conflict]:
    """Yield values that conflict."""
    yield from _image_conflicts(train)
    yield from _optimizer_conflicts(train)
    yield from _forward_conflicts(train)
    yield from _strategy_conflicts(train, job)
    if train.dataset in ("shapes", "random") and train.samples is not None and train.samples < 5:
        yield Conflict(
            keys=("train.samples", "train.dataset"),
            message=f"found {train.samples}, expected at least 5 generated images (a fifth of them are for the test)",
        )
    if train.sync_bn and job.cpu_reason:
        yield Conflict(
            keys=("train.sync_bn", "device", "resources.gpus_per_node"),
            message=f"torch's SyncBatchNorm works on GPUs only, and {job.cpu_reason}",
            hint="leave it out: before each evaluation the ranks' batch norm statistics are averaged anyway",
        )


def _image_conflicts(train: TrainSpec) -> Iterator[Conflict]:
    if train.dataset == FOLDER and train.data_dir is None:
        yield Conflict(
            keys=("train.data_dir", "train.dataset"),
            message="dataset folder reads data_dir/train and data_dir/test, and no data_dir is set",
        )
    if train.dataset in IMAGE_SETS and IMAGE_SETS[train.dataset].side is None and train.image_size is None:
        yield Conflict(
            keys=("train.image_size", "train.dataset"),
            message=f"{train.dataset} has images of many sizes, and no image_size is set",
            hint="image_size: 224 brings all of them to 224x224",
        )
    own = BUILT_IN.get(train.dataset)
    if own is not None and train.image_size is not None and train.image_size < own:
        yield Conflict(
            keys=("train.image_size", "train.dataset"),
            message=f"found {train.image_size}, expected at least {own}, the size of {train.dataset}'s images",
        )
    side = train.image_size or own_side(train.dataset)
    if train.model == "fastnet" and side is not None and not fits_fastnet(side):
        yield Conflict(
            keys=("train.model", "train.image_size", "train.dataset"),
            message=f"fastnet is for images of 32x32 pixels (25 to 48 will do), and these have {side}x{side}",
            hint="resnet18 takes any size",
        )
    kept = kept_side(train.dataset, train.image_size)
    for name, pixels in (("translate", train.translate), ("cutout", train.cutout)):
        if kept is not None and pixels >= kept:
            yield Conflict(
                keys=(f"train.{name}",),
                message=f"found {pixels}, expected less than {kept}: the images are kept at {kept}x{kept}",
            )


def _forward_conflicts(train: TrainSpec) -> Iterator[Conflict]:
    if train.sync_bn and train.model == "fastnet":
        yield Conflict(
            keys=("train.sync_bn", "train.model"),
            message="fastnet has a batch norm of its own form, which torch's SyncBatchNorm would replace",
            hint="resnet18 can do it",
        )
    if train.compile == "max" and train.deterministic:
        yield Conflict(
            keys=("train.compile", "train.deterministic"),
            message="max chooses kernels by timing them, so two runs may come to other last bits",
            hint="train.compile: always repeats",
        )
    if train.strategy == "dp" and train.compile in ("always", "max"):
        yield Conflict(
            keys=("train.compile", "train.strategy"),
            message="DataParallel's copies of the model, new in each step, cannot be compiled",
            hint="strategy none or ddp on one GPU compiles",
        )


def _optimizer_conflicts(train: TrainSpec) -> Iterator[Conflict]:
    if train.optimizer == "adam" and train.lr_scaling == "linear":
        yield Conflict(
            keys=("train.lr_scaling", "train.optimizer"),
            message="adam's steps do not grow with the batch, so its learning rate must not either",
            hint="leave lr_scaling out; to follow a published recipe, write the scaled rate into train.lr",
        )
    if train.optimizer != "adam" and train.nesterov and train.momentum == 0:
        yield Conflict(
            keys=("train.momentum", "train.nesterov"),
            message="nesterov needs a momentum above 0",
            hint="train.nesterov: false is plain SGD",
        )


def _strategy_conflicts(train: TrainSpec, job: JobSpec) -> Iterator[Conflict]:
    if train.strategy == "ddp":
        return
    if job.resources.world_size > 1:
        hint = (
            "resources.procs_per_node: 1, and gpus_per_node as many as it shall drive"
            if train.strategy == "dp"
            else None
        )
        yield Conflict(
            keys=("train.strategy", "resources.procs_per_node", "resources.nodes"),
            message=f"{train.strategy} is one process, and the run has {job.resources.world_size} ranks",
            hint=hint,
        )
    if train.comm != "exact":
        yield Conflict(
            keys=("train.comm", "train.strategy"), message=f"{train.comm} is between ranks, and {train.strategy} is one"
        )
