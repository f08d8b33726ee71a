"""A script that torchrun starts: every number from the environment, none from the command line."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0 + float(os.environ.get("BONUS", "0"))])
dist.all_reduce(total)
place = f"local rank {os.environ['LOCAL_RANK']} on node {os.environ['GROUP_RANK']}"
print(f"rank {rank} of {world_size}, {place}: sum {int(total.item())}\n", end="", flush=True)
dist.destroy_process_group()
