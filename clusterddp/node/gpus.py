"""Which GPUs the ranks of a node see, from what Slurm has made visible to each of their tasks.

Users expect LOCAL_RANK to index what a rank sees. Slurm shows all tasks the same GPUs (--gpus-per-node, --gres), or
each its own (--gpus-per-task, --gpu-bind), and where it also confines tasks to their devices, every task's own GPU is
number 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskGpus:
    """What one task was given."""

    visible: tuple[str, ...] | None
    """CUDA_VISIBLE_DEVICES; None: it is not set."""
    bound: bool
    """True when Slurm was asked to bind GPUs to tasks."""

    @classmethod
    def of(cls, visible: str | None, *, bound: bool) -> TaskGpus:
        names = None if visible is None else tuple(filter(None, (name.strip() for name in visible.split(","))))
        return cls(visible=names, bound=bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the ranks of a node are told."""

    visible: tuple[str, ...] | None = None
    """For CUDA_VISIBLE_DEVICES of all ranks; None: each keeps what its task has."""
    device: int | None = None
    """Which of the GPUs that it sees is a rank's own; None: LOCAL_RANK says."""
    one_each: bool = False
    """Each rank sees its own of `visible` alone: CUDA shows a process one slice (MIG)."""


def choose_gpus(tasks: Sequence[TaskGpus]) -> Choice:
    """Choose for the ranks of a node; the tasks come in the order of their local ranks."""
    lists = [task.visible for task in tasks]
    if not lists or any(not names for names in lists):
        return Choice()
    known = [names for names in lists if names]
    if len(set(known)) == 1:
        enough = len(known[0]) >= len(known)
        if enough and len(known) > 1 and known[0][0].startswith("MIG-"):
            return Choice(visible=known[0], one_each=True)
        return Choice() if enough or not tasks[0].bound else Choice(device=0)
    firsts = [names[0] for names in known]
    if len(set(firsts)) < len(firsts):
        return Choice(device=0)
    numbered = all(name.isdigit() for names in known for name in names)
    if not numbered:
        # Devices by their ids, perhaps hidden from the other tasks: CUDA stops reading at the first that it cannot see.
        return Choice(device=0)
    return Choice(visible=tuple(dict.fromkeys([*firsts, *(name for names in known for name in names)])))
