"""A script of torch.distributed.launch's time: it wants --local_rank on its command line, the rest from variables."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
dist.init_process_group("gloo")
ranks = torch.tensor([float(args.local_rank)])
dist.all_reduce(ranks)
print(f"local rank {args.local_rank}, sum {int(ranks.item())}, lr {args.lr}", flush=True)
dist.destroy_process_group()
