"""One turn of a peer's training loop on the tensors that the trainer trains on; prints one line of JSON.

    python benchmarks/trainer_peers.py NAME --warm-steps 2 --steps 4 [--batch 128] [--kuangliu CLONE]

Started by benchmarks/trainer.py with the Python that has the peers; for two processes once for each rank, with
torchrun's variables. Images are brought to float32 and normalised before the clock starts, in memory: no loop here
spends time on files, decoding or augmentation, while the trainer's own turns augment.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Clock:
    """Receives every finished step; the first `warm_steps` do not count. Losses were read, so nothing is pending."""

    def __init__(self, warm_steps: int, steps: int) -> None:
        self.warm_steps, self.steps = warm_steps, steps
        self.done = 0
        self.began = self.ended = 0.0

    def step(self) -> bool:
        """Count a step; True when it was the last one."""
        self.done += 1
        now = time.perf_counter()
        if self.done == self.warm_steps:
            self.began = now
        self.ended = now
        return self.done == self.warm_steps + self.steps


def kuangliu(arguments: argparse.Namespace, data: Any, clock: Clock) -> dict[str, Any]:
    """Run the training loop of kuangliu/pytorch-cifar's main.py with the repository's own ResNet18."""
    import torch
    from torch import nn

    sys.path.insert(0, arguments.kuangliu)
    from models.resnet import ResNet18  # type: ignore[import-not-found]

    net = ResNet18()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    net.train()
    train_loss, correct, total = 0.0, 0, 0
    for inputs, targets in endless(loader(data, arguments.batch)):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        if clock.step():
            break
    return {"loss": train_loss / clock.done, "precision": "fp32"}


def modelarts(arguments: argparse.Namespace, data: Any, clock: Clock) -> dict[str, Any]:
    """Run a loop like the one of ModelArts' published job: TensorDataset, Adam with 0.01, the loss read in every step.

    Source: Huawei Cloud's page modelarts-distributed-0010. Its code is not copied; the net is ours, of the same shape.
    """
    import torch
    from torch import nn

    model = net_of(arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    model.train()
    train_loss = 0.0
    for inputs, targets in endless(loader(data, arguments.batch)):
        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        if clock.step():
            break
    return {"loss": train_loss / clock.done, "precision": "fp32"}


def lightning(arguments: argparse.Namespace, data: Any, clock: Clock) -> dict[str, Any]:
    """Fit with Lightning's Trainer.

    Defaults: nothing said but where to run. Best: what its pages advise for speed on a CPU: bf16-mixed if the CPU has
    bf16, and nothing beside the steps (no logger, checkpoints, progress bar or model summary); channels_last, as
    PyTorch's pages advise.
    """
    import torch

    from clusterddp.train.data.download import import_torchvision

    with contextlib.suppress(ImportError):  # torchvision built for another torch fails when torchmetrics imports it
        import_torchvision()
    from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.callbacks import Callback  # type: ignore[import-not-found]
    from torch.nn.functional import cross_entropy

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net_of(arguments)

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, targets = batch
            if arguments.best:
                inputs = inputs.to(memory_format=torch.channels_last)
            loss = cross_entropy(self.net(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    class Steps(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if clock.step():
                trainer.should_stop = True

    quiet = {
        "precision": "bf16-mixed" if has_bf16() else "32-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    gang = {"devices": arguments.ranks, "strategy": "ddp"} if arguments.ranks > 1 else {"devices": 1}
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator=arguments.device,
            callbacks=[Steps()],
            default_root_dir=directory,
            max_steps=clock.warm_steps + clock.steps,
            **gang,
            **(quiet if arguments.best else {}),
        )
        trainer.fit(Net(), loader(data, arguments.batch))
    return {"loss": float(trainer.callback_metrics["train_loss"]), "precision": str(trainer.precision)}


def accelerate(arguments: argparse.Namespace, data: Any, clock: Clock) -> dict[str, Any]:
    """Train with the loop of Accelerate's quick tour; best: channels_last, and bf16 if the CPU has it."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from torch.nn.functional import cross_entropy

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if arguments.best and has_bf16() else None)
    model = net_of(arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(data, arguments.batch))
    model.train()
    train_loss = 0.0
    layout = torch.channels_last if arguments.best else torch.preserve_format
    for inputs, targets in endless(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs.to(memory_format=layout)), targets)
        accelerator.backward(loss)
        optimizer.step()
        train_loss += loss.item()
        if clock.step():
            break
    return {"loss": train_loss / clock.done, "precision": str(accelerator.mixed_precision)}


PEERS: dict[str, Callable[[argparse.Namespace, Any, Clock], dict[str, Any]]] = {
    "kuangliu": kuangliu,
    "modelarts": modelarts,
    "lightning": lightning,
    "accelerate": accelerate,
}


def has_bf16() -> bool:
    """Return whether this CPU has bf16: emulated, it is many times slower than fp32, and no flag for speed."""
    from clusterddp.train.device import cpu_bf16_units

    return any(cpu_bf16_units())


def net_of(arguments: argparse.Namespace) -> Any:
    import torch

    from clusterddp.train.models.convolution import Conv
    from clusterddp.train.models.resnet import ResNet18

    net = ResNet18()
    for layer in net.modules():
        if isinstance(layer, Conv):
            layer.__class__ = torch.nn.Conv2d  # what a user of another loop has
    return net.to(memory_format=torch.channels_last) if arguments.best else net


def tensors(samples: int) -> Any:
    """Return the trainer's own noise (dataset `random`), normalised, as a TensorDataset of float32 in NCHW."""
    from torch.utils.data import TensorDataset

    from clusterddp.spec.train import TrainSpec
    from clusterddp.train.data.augment import normalize
    from clusterddp.train.data.dataset import load_dataset

    spec = TrainSpec(dataset="random", samples=samples)
    whole = load_dataset(spec)
    return TensorDataset(normalize(whole.train_images, mean=whole.mean, std=whole.std), whole.train_labels)


def loader(data: Any, batch: int) -> Any:
    """Batch the tensors as the loops do: shuffled. Without workers, which cost more than they give in memory."""
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)


def endless(batches: Any) -> Any:
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=1280)
    parser.add_argument("--warm-steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kuangliu", default="")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="of lightning")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = Clock(arguments.warm_steps, arguments.steps)
    with contextlib.redirect_stdout(io.StringIO()):
        facts = PEERS[arguments.peer](arguments, tensors(arguments.samples), clock)
    assert clock.done == clock.warm_steps + clock.steps
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0:
        print(json.dumps({"seconds": clock.ended - clock.began, "steps": clock.steps, "facts": facts}))


if __name__ == "__main__":
    main()
