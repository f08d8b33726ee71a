"""The spec's `train` section as the plan of a run holds it: checked and complete, read with nothing but Python.

spec/model.py has the class of the same name that checks what people write; where ranks run there may be no pydantic.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import ClusterddpError

_REMOVED = ("comm_allow",)
"""Keys that plans of earlier versions have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """What to train; `clusterddp schema` explains each key."""

    model: str = "resnet18"
    dataset: str = "shapes"
    image_size: int | None = None
    data_dir: str | None = None
    download: bool = True
    samples: int | None = None
    epochs: int = 10
    batch_size: int = 128
    accumulate: int = 1
    max_steps: int | None = None
    precision: str = "auto"
    seed: int = 0
    deterministic: bool = False
    lr: float = 0.1
    lr_scaling: str = "auto"
    lr_batch: int = 128
    warmup: float = 0.2
    schedule: str = "onecycle"
    optimizer: str = "sgd"
    muon_lr: float = 0.04
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    ema: float = 0.0
    label_smoothing: float = 0.1
    augment: str = "flip_translate"
    translate: int = 2
    cutout: int = 0
    tta: str = "none"
    comm: str = "exact"
    strategy: str = "ddp"
    sync_bn: bool = False
    compile: str = "auto"
    width: float = 1.0
    eval_every: int = 1
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    log_every: int = 20

    @classmethod
    def from_json(cls, section: dict[str, Any]) -> TrainSpec:
        """Read the section of a plan. An older version's plan may lack keys, which get their defaults, and has others.

        Raises: ClusterddpError: a key is unknown to this version.
        """
        section = {key: value for key, value in section.items() if key not in _REMOVED}
        unknown = sorted(section.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ClusterddpError(
                f"the plan has train.{', train.'.join(unknown)}, which this version does not know",
                hint="submit the run again, or resume it with the version that submitted it",
            )
        return cls(**section)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
