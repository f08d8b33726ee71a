"""A script of torch.distributed.launch's time: it wants --local_rank on its command line, the rest from variables."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
place = f"local rank {args.local_rank} on node {os.environ['GROUP_RANK']}"
print(f"lr {args.lr}\nrank {rank} of {world_size}, {place}: sum {int(total.item())}\n", end="", flush=True)
dist.destroy_process_group()
