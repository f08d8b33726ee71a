"""Hugging Face's Trainer: a callback reports, and saves when the run is asked to stop."""

from math import inf

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import clusterddp
from clusterddp import checkpoint


class Slope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        predicted = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        clusterddp.log(logs, step=state.global_step)

    def on_step_end(self, args, state, control, **_):
        clusterddp.progress(state.global_step, state.max_steps)
        if checkpoint.due(state.global_step, every_s=inf):  # a stop
            control.should_save = control.should_training_stop = True


torch.manual_seed(0)
points = torch.linspace(-1, 1, 64).unsqueeze(1)
arguments = TrainingArguments(
    output_dir=str(clusterddp.output_dir()),
    per_device_train_batch_size=4,
    num_train_epochs=4,
    learning_rate=0.1,
    logging_steps=4,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
model = Slope()
trainer = Trainer(model, arguments, train_dataset=[{"x": x, "labels": 3 * x} for x in points], callbacks=[Report()])
again = clusterddp.resumed_from()
newest = get_last_checkpoint(arguments.output_dir) if again else None
trainer.train(resume_from_checkpoint=newest)
print(f"rank {arguments.process_index} of {arguments.world_size}: {model.layer.weight.item():.6f}")
