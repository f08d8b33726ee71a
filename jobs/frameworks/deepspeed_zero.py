"""DeepSpeed, ZeRO stage 3: it shards the model itself and writes its own checkpoints; clusterddp says when."""

import deepspeed
import torch

import clusterddp
from clusterddp import checkpoint

STEPS = 40
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}

deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

saved = checkpoint.load()  # the step; the state is in DeepSpeed's files
if saved:
    tag = f"step-{saved['step']}"
    engine.load_checkpoint(str(clusterddp.output_dir()), tag=tag)

for step in range(saved["step"] + 1 if saved else 1, STEPS + 1):
    inputs = torch.randn(4, 1, generator=torch.Generator().manual_seed(1000 * step + engine.global_rank))
    inputs = inputs.to(engine.device)
    loss = torch.nn.functional.mse_loss(engine(inputs), 3 * inputs)
    engine.backward(loss)
    engine.step()
    clusterddp.log({"loss": loss}, step=step, total=STEPS)
    if checkpoint.due(step, every=20):  # on all ranks
        engine.save_checkpoint(str(clusterddp.output_dir()), tag=f"step-{step}")
        checkpoint.save({}, step=step)

with deepspeed.zero.GatheredParameters(model.weight):
    print(f"rank {engine.global_rank} of {engine.world_size}: {model.weight.item():.6f}")
