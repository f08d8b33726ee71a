"""Which way ranks exchange: the mode that the spec names, made ready for a model."""

from __future__ import annotations

import torch
from torch import nn

from clusterddp.train.comm.ddp import Bf16Exchange, DdpExchange
from clusterddp.train.comm.exchange import Exchange
from clusterddp.train.comm.local import LocalSteps
from clusterddp.train.comm.powersgd import PowerSgd
from clusterddp.train.comm.shared import SharedMemory, share_memory
from clusterddp.train.group import Group


def build_exchange(
    comm: str, model: nn.Module, group: Group, *, optimizer: torch.optim.Optimizer, total_steps: int, seed: int
) -> Exchange:
    """Make the exchange of mode `comm` (exact, bf16, powersgd:R, local:H); rank 0's weights become everybody's.

    The docstring of each class says what it costs; docs/trainer.md, when it pays.
    """
    if group.world_size == 1:
        return Exchange(model, group)
    mode, _, number = comm.partition(":")
    if mode == "exact":
        memory = share_memory(model, group)
        return DdpExchange(model, group) if memory is None else SharedMemory(model, group, memory)
    if mode == "bf16":
        return Bf16Exchange(model, group)
    if mode == "powersgd":
        return PowerSgd(model, group, rank=int(number), total_steps=total_steps, seed=seed)
    if mode == "local":
        return LocalSteps(model, group, every=int(number), optimizer=optimizer)
    raise ValueError(f"comm: {comm!r} is none of exact, bf16, powersgd:R, local:H")
