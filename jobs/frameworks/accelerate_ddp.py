"""Accelerate: `Accelerator()`, `prepare`, `backward`, without `accelerate launch` and `accelerate config`."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import clusterddp
from clusterddp import checkpoint

accelerator = Accelerator()

inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
dataset = TensorDataset(inputs, 3 * inputs)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=4, shuffle=True))

saved = checkpoint.load()
if saved:
    accelerator.unwrap_model(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

step, steps = saved["step"] if saved else 0, 4 * len(loader)
while step < steps:
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        clusterddp.log({"loss": loss}, step=step, total=steps)
        if checkpoint.due(step):
            weights = accelerator.unwrap_model(model).state_dict()
            moments = optimizer.state_dict()
            checkpoint.save({"model": weights, "optimizer": moments}, step=step)
        if step == steps:
            break

weight = accelerator.unwrap_model(model).weight.item()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {weight:.6f}")
accelerator.end_training()
