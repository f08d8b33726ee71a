"""A script in the interface of GluonCV's training scripts, written for the tests: --config-file, in it DDP_CONFIG.

Like them it finds its machine among WOLRD_URLS (sic) by the address with which it would go to the internet, and starts
a process for each GPU; without a GPU it starts one, where they would start none.
"""

import argparse
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 80))
        return str(probe.getsockname()[0])


def worker(gpu: int, gpus: int, config: dict[str, Any]) -> None:
    rank, world_size = config["WORLD_RANK"] * gpus + gpu, config["WORLD_SIZE"] * gpus
    dist.init_process_group(config["DIST_BACKEND"], init_method=config["DIST_URL"], rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print(f"rank {rank} of {world_size}: sum {int(total.item())}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file")
    with open(parser.parse_args().config_file) as file:
        ddp = yaml.safe_load(file)["DDP_CONFIG"]
    ddp["WORLD_RANK"] = ddp["WOLRD_URLS"].index(own_address())
    each = torch.cuda.device_count() or 1
    mp.spawn(worker, nprocs=each, args=(each, ddp))
