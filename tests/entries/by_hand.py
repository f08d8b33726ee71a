"""A script that calls init_process_group with all that it takes: by_hand.py INIT_METHOD RANK WORLD_SIZE."""

import sys

import torch
import torch.distributed as dist

init_method, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
met = init_method.partition("://")[0]
print(f"met by {met}\nrank {rank} of {world_size}: sum {int(total.item())}\n", end="", flush=True)
dist.destroy_process_group()
