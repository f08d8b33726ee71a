"""The memory that a run of the trainer on this machine's CPU needs, compared with the free memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from clusterddp.errors import ClusterddpError, PreflightError
from clusterddp.facts.memory import free_bytes
from clusterddp.facts.training_memory import split_batch, training_memory
from clusterddp.planning.placement import Placement
from clusterddp.spec.image_sets import BUILT_IN, IMAGE_SETS
from clusterddp.system.units import format_bytes


def fit_memory(
    name: str, spec: dict[str, Any], placement: Placement, *, free: int | None = None
) -> tuple[dict[str, Any], Placement]:
    """Return the spec for the ranks and the placement with a note on the memory that they need.

    If the memory holds all ranks but no step of one rank, the ranks split each batch into micro-batches. `spec`: with
    all defaults; `free`: bytes, None: the free memory of this machine.
    Raises: PreflightError: the memory does not hold the ranks, or a step of one image.
    """
    train = spec["train"]
    side = train and (train["image_size"] or _side(train["dataset"]))
    free = free or free_bytes()
    if not (train and side and free and placement.on_cpu):
        return spec, placement
    num_ranks = sum(len(node.ranks) for node in placement.nodes)
    try:
        parts = split_batch(train, image_size=side, num_ranks=num_ranks, free=free)
    except ClusterddpError as error:
        raise PreflightError(f"{name}: {error.message}", hint=error.hint) from error
    micro = {"batch_size": train["batch_size"] // parts, "accumulate": train["accumulate"] * parts}
    need = training_memory(train | micro, image_size=side)
    if need is None:
        return spec, placement
    notes = [
        f"about {format_bytes(num_ranks * need.resident)} of memory for {num_ranks} rank{'s' * (num_ranks > 1)}, and "
        f"{format_bytes(need.step)} for each rank in a step; {format_bytes(free)} are free"
    ]
    if parts > 1:
        notes.append(
            f"too little for a batch of {train['batch_size']} images: each rank splits it into {parts} micro-batches "
            f"of {micro['batch_size']} (train.accumulate {micro['accumulate']}). The step has the same samples; batch "
            "norm sees them in smaller batches"
        )
    placement = dataclasses.replace(placement, notes=(*placement.notes, *notes))
    return spec | {"train": train | micro}, placement


def _side(dataset: str) -> int | None:
    """Return the side of a set's images in pixels; None if only its files show it."""
    return BUILT_IN.get(dataset) or (IMAGE_SETS[dataset].side if dataset in IMAGE_SETS else None)
