"""A script as Lightning's pages have it: a LightningModule, a Trainer on two nodes with two processes each.

With --fail-rank N that rank raises at its second batch.
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitSlope(L.LightningModule):
    def __init__(self, fail_rank=None):
        super().__init__()
        self.fail_rank = fail_rank
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layer(inputs), targets)
        if batch_idx == 1 and self.global_rank == self.fail_rank:
            raise ValueError(f"batch {batch_idx} is bad")
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-rank", type=int)
    args = parser.parse_args()

    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    train_loader = DataLoader(TensorDataset(inputs, 3 * inputs), batch_size=4)

    model = LitSlope(args.fail_rank)
    trainer = L.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp", max_epochs=2)
    trainer.fit(model, train_loader)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {model.layer.weight.item():.6f}")


if __name__ == "__main__":
    main()
