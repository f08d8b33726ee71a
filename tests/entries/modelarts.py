"""A training script in the interface of ModelArts' published PyTorch sample, written for the tests.

The platform starts it with --init_method tcp://ADDRESS:PORT --rank N --world_size N, and with the paths of its input
and output: --data_url and --output_dir. It reads no variable.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable_gpu", default="true")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--init_method", default=None)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--data_url", default=".")
    parser.add_argument("--output_dir", default=".")
    args, _ = parser.parse_known_args()
    dist.init_process_group("gloo", init_method=args.init_method, rank=args.rank, world_size=args.world_size)
    slope = json.loads((Path(args.data_url) / "slope.json").read_text())
    torch.manual_seed(args.rank)
    inputs = torch.randn(64, 1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.epochs * 50):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), slope * inputs).backward()
        optimizer.step()
    total = torch.tensor([args.rank + 1.0])
    dist.all_reduce(total)
    print(f"rank {args.rank} of {args.world_size}: sum {int(total.item())}\n", end="", flush=True)
    if args.rank == 0:
        result = {"world_size": dist.get_world_size(), "slope": model.module.weight.item(), "init": args.init_method}
        (Path(args.output_dir) / "result.json").write_text(json.dumps(result))
    print(f"rank {args.rank} of {dist.get_world_size()}: {model.module.weight.item():.6f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
