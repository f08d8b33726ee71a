"""Fit a line with DistributedDataParallel: a script that runs under clusterddp, under torchrun, and by itself."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import clusterddp
from clusterddp import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    fit(arguments.steps, arguments.lr)


def fit(steps: int, lr: float) -> None:
    """Fit the line; jobs/function.yaml calls this."""
    for name, default in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, default)
    dist.init_process_group(os.environ.get("CLUSTERDDP_BACKEND", "gloo"))
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if dist.get_backend() == "nccl" else "cpu"

    generator = torch.Generator().manual_seed(rank)  # each rank has points of its own
    x = torch.rand(256, 1, generator=generator).to(device)
    y = 3 * x + 1
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    done = 0
    saved = checkpoint.load(map_location=device)
    if saved:
        done = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    while done < steps:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        clusterddp.log({"loss": loss.detach()}, step=done, total=steps)
        if checkpoint.due(done, every=100):
            checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=done)
    if rank == 0:
        weight, bias = (parameter.item() for parameter in model.module.parameters())
        print(f"after {done} steps of {dist.get_world_size()} ranks: y = {weight:.3f} x + {bias:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
