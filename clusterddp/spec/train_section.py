"""The spec's `train` section: the settings of the built-in trainer, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from clusterddp.spec import fields
from clusterddp.spec.fields import Comm, Count, Pixels, Word
from clusterddp.spec.image_sets import BUILT_IN, FOLDER, IMAGE_SETS, fits_fastnet, kept_side, own_side
from clusterddp.spec.section import Conflict, Section

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec


class TrainSpec(Section):
    """The built-in trainer: an image classifier, on a set by its name or on images of your own."""

    model: Annotated[Literal["resnet18", "fastnet"], Word] = Field(
        default="resnet18",
        description="resnet18 (11.2 million parameters; it begins with a 3x3 convolution, for images above 64x64 with "
        "the 7x7 convolution and max-pool of ImageNet's) or fastnet (small, quick, for 32x32 images).",
    )
    dataset: fields.ImageSetName = Field(
        default="shapes",
        description="shapes (generated, learnable, needs no file), random (generated noise: its accuracy means "
        "nothing), cifar10, fashion_mnist, a classification set of torchvision by its class's name in small letters "
        "(stl10, cifar100, food101, ...), or folder: your own, data_dir/train/CLASS/*.jpg and data_dir/test (or val).",
    )
    image_size: fields.Side | None = Field(
        default=None,
        description="Side in pixels, 8 to 1024, of the images that the model sees: others are made smaller or larger, "
        "and cut to the square in their middle. Default: the set's own size; sets with images of many sizes need it.",
    )
    data_dir: fields.Text | None = Field(
        default=None, description="Directory of the data set on every node; default: the user's cache directory."
    )
    download: fields.Switch = Field(
        default=True, description="Download the data set where it is missing, once per host."
    )
    samples: Count | None = Field(
        default=None,
        description="Training images that are used or generated; default: all, or 10000 where they are generated. "
        "Generated sets have a fifth of it as test images.",
    )
    epochs: Count = Field(default=10, description="Passes over the training images.")
    batch_size: Count = Field(default=128, description="Images per rank and step.")
    accumulate: Count = Field(default=1, description="Batches whose gradients are summed before one optimizer step.")
    max_steps: Count | None = Field(
        default=None, description="Optimizer steps in all, after which training ends; default: none."
    )
    precision: Annotated[Literal["auto", "fp32", "bf16"], Word] = Field(
        default="auto",
        description="Arithmetic of the model; auto: bf16 where it is faster: GPUs that have it, CPUs on which two "
        "trial steps are faster.",
    )
    seed: fields.Seed = Field(default=0, description="Seed of weights, order and augmentation, 0 to 2^32-1.")
    deterministic: fields.Switch = Field(
        default=False, description="Bit-equal results from run to run; slower on GPUs."
    )
    lr: fields.Positive = Field(
        default=0.1, description="Peak learning rate, meant for a global batch of lr_batch images."
    )
    lr_scaling: Annotated[Literal["auto", "linear", "none"], Word] = Field(
        default="auto",
        description="linear: the learning rate grows with global batch / lr_batch; none: it is taken as it is; auto: "
        "linear for sgd and muon, over sqrt(ranks) with comm local:H; none for adam, whose steps do not grow with the "
        "batch.",
    )
    lr_batch: Count = Field(default=128, description="Global batch that lr is meant for.")
    warmup: fields.Fraction = Field(
        default=0.2, description="Fraction of all steps over which the learning rate rises."
    )
    schedule: Annotated[Literal["onecycle", "triangle", "constant"], Word] = Field(
        default="onecycle",
        description="Learning rate after the warm-up: down by a cosine, down by a straight line, or constant.",
    )
    optimizer: Annotated[Literal["sgd", "muon", "adam"], Word] = Field(
        default="sgd",
        description="How weights move; muon: those of convolutions are turned by as much in every direction, the rest "
        "is sgd's. momentum and nesterov are for both of these.",
    )
    muon_lr: fields.Positive = Field(
        default=0.04,
        description="Peak learning rate of what muon turns, a share of the weights' length; it does not grow with the "
        "batch. Steps of 2000 images want more, such as 0.24 with momentum 0.6.",
    )
    momentum: fields.BelowOne = Field(default=0.9, description="Momentum of SGD.")
    nesterov: fields.Switch = Field(default=True, description="Nesterov's form of momentum.")
    weight_decay: fields.NotNegative = Field(
        default=5e-4, description="Weight decay; biases and batch norm's parameters do not decay."
    )
    ema: fields.BelowOne = Field(
        default=0.0,
        description="Share that a running mean of the weights keeps in each step, such as 0.999; it is evaluated "
        "beside the weights. 0: none.",
    )
    label_smoothing: fields.BelowOne = Field(
        default=0.1, description="Share of each label that is spread over all classes."
    )
    augment: Annotated[Literal["none", "flip", "flip_translate"], Word] = Field(
        default="flip_translate",
        description="Random changes to training images: none, mirrored, or mirrored and moved.",
    )
    translate: Pixels = Field(
        default=2,
        description="Pixels by which flip_translate moves images at most, each way; they count before images are "
        "enlarged to image_size.",
    )
    cutout: Pixels = Field(
        default=0,
        description="Side in pixels of a square that is blanked in each training image, before it is enlarged to "
        "image_size; 0: none.",
    )
    tta: Annotated[Literal["none", "mirror", "mirror_translate"], Word] = Field(
        default="none",
        description="Test-time augmentation: the mean over mirrored (and moved) copies, reported as accuracy_tta.",
    )
    comm: Comm = Field(
        default="exact",
        description="How ranks exchange: exact (the mean of all gradients, in full), bf16 (the same in half the "
        "bytes), or local:H (each rank takes steps of its own; each step averages another 1/H of the weights across "
        "ranks). All but exact change results.",
    )
    strategy: Annotated[Literal["ddp", "dp", "none"], Word] = Field(
        default="ddp",
        description="ddp: a process for each rank. For comparison: dp, one process that drives all GPUs of its node by "
        "torch's DataParallel, and none, one process and one device.",
    )
    sync_bn: fields.Switch = Field(
        default=False, description="Batch norm over the batches of all ranks (SyncBatchNorm); on GPUs only."
    )
    compile: Annotated[Literal["auto", "always", "never", "max"], Word] = Field(
        default="auto",
        description="torch.compile; auto: on GPUs, where it pays, unless a rank cannot compile; max: on GPUs with "
        "kernels chosen by timing, and CUDA graphs where a step has one micro-batch, else as always.",
    )
    width: fields.Positive = Field(default=1.0, description="Multiplier of fastnet's channels.")
    eval_every: Count = Field(default=1, description="Epochs between evaluations on the test images.")
    checkpoint_every: Count = Field(default=1, description="Epochs between checkpoints.")
    keep_checkpoints: Count = Field(default=2, description="Checkpoints that are kept; older ones are deleted.")
    log_every: Count = Field(default=20, description="Steps between lines of metrics.")


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
