"""FSDP2: parameters, gradients and optimizer states are sharded over the ranks, and so are the checkpoints."""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import clusterddp
from clusterddp import checkpoint

STEPS = 200

dist.init_process_group(os.environ.get("CLUSTERDDP_BACKEND", "gloo"))
kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


saved = checkpoint.load(state)  # fills what `state` returns
if saved:
    weights, moments = saved["model"], saved["optimizer"]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=moments,
    )

for step in range(saved["step"] + 1 if saved else 1, STEPS + 1):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 8, generator=generator).to(device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    clusterddp.log({"loss": loss}, step=step, total=STEPS)
    if checkpoint.due(step, every=100):
        checkpoint.save(state(), step=step)

checkpoint.wait()
weight = model[2].weight.full_tensor()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {weight.sum().item():.6f}")
dist.destroy_process_group()
