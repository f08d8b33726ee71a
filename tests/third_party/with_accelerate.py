"""A script as Accelerate's quick tour has it: `Accelerator()`, `prepare`, `backward`."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()

inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
dataset = TensorDataset(inputs, 3 * inputs)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8)
loss_function = torch.nn.MSELoss()

model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(dataset, batch_size=4, shuffle=True), scheduler
)

for batch in training_dataloader:
    optimizer.zero_grad()
    inputs, targets = batch
    outputs = model(inputs)
    loss = loss_function(outputs, targets)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()

weight = accelerator.unwrap_model(model).weight.item()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {weight:.6f}")
accelerator.end_training()
