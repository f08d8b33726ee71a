"""Lightning: a LightningModule and a Trainer that takes its sizes from the launcher."""

import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import clusterddp


class Slope(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        clusterddp.log({"loss": loss}, step=self.global_step + 1, total=int(self.trainer.estimated_stepping_batches))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        asked = clusterddp.should_stop()
        # All ranks stop at the same step.
        if trainer.strategy.reduce_boolean_decision(asked, all=False):
            trainer.should_stop = True


def main():
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(inputs, 3 * inputs), batch_size=4)
    last = clusterddp.output_dir() / "last.ckpt"
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=4,
        default_root_dir=clusterddp.output_dir(),
        callbacks=[Stop()],
    )
    model = Slope()
    again = clusterddp.resumed_from() and last.exists()
    trainer.fit(model, loader, ckpt_path=str(last) if again else None)
    trainer.save_checkpoint(last)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {model.layer.weight.item():.6f}")


if __name__ == "__main__":
    main()
