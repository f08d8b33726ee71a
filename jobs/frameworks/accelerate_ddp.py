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

parts = {"model": accelerator.unwrap_model(model), "optimizer": optimizer}
done, size = 0, 4 * accelerator.num_processes
if saved := checkpoint.load():
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    done = saved["samples"] // size  # steps, on any number of ranks

while done < 4 * len(loader):
    for inputs, targets in accelerator.skip_first_batches(loader, done % len(loader)):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        done += 1
        clusterddp.log({"loss": loss}, step=done, total=4 * len(loader))
        if checkpoint.due(done):
            state = {name: part.state_dict() for name, part in parts.items()}
            checkpoint.save(state | {"samples": done * size}, step=done)

weight = accelerator.unwrap_model(model).weight.item()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {weight:.6f}")
accelerator.end_training()
