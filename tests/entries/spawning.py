"""A script that starts its ranks itself, as many do: torch.multiprocessing.spawn, one process per GPU (here: --nprocs).

Like pytorch/examples' imagenet it takes RANK and WORLD_SIZE for the number of this machine and of machines.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(local_rank: int, args: argparse.Namespace) -> None:
    machines, machine = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    rank, world_size = machine * args.nprocs + local_rank, machines * args.nprocs
    dist.init_process_group("gloo", init_method=args.dist_url, rank=rank, world_size=world_size)
    if rank == args.fail_rank:
        raise ValueError(f"rank {rank} has bad data")
    if rank // args.nprocs == args.fail_rank // args.nprocs:
        time.sleep(3600)  # of several that have failed, spawn reports any; it ends this one
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    place = f"local rank {local_rank} on node {machine}"
    print(f"rank {rank} of {world_size}, {place}: sum {int(total.item())}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int)
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--fail-rank", type=int, default=-1)
    args = parser.parse_args()
    mp.spawn(worker, nprocs=args.nprocs, args=(args,))
