"""Compute slots: where a host's ranks outnumber its cores, or its memory, only some of them compute at a time.

A step's forward and backward pass needs many times the memory of what a rank keeps between steps. Sixteen ranks on two
cores are not faster when all compute at once. So two compute at a time, and each returns its memory before the next
begins, unless there is enough for all. The results are the same to the last bit. A rank that holds a slot never waits
for another rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clusterddp.facts.memory import free_bytes, read_cpu_limit
from clusterddp.facts.training_memory import can_keep_steps, plan_turns, training_memory
from clusterddp.system.units import format_bytes
from clusterddp.train.host import Host

if TYPE_CHECKING:
    from clusterddp.train.spec import TrainSpec

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_RETURNED_FROM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ComputeSlot:
    """The slot that a rank shares with others; `lock` is None where all ranks of the host compute at once."""

    lock: int | None = None
    """A file in which each rank of the host locks one byte, that of its slot."""
    index: int = 0
    is_first: bool = True
    """Whether this rank is the first one of its host."""
    returns_memory: bool = False
    """Whether the memory of a step goes back to the system after it, for another rank; else it is kept for the next."""
    description: str = ""
    """How the ranks of rank 0's host share its cores, for the log."""

    def acquire(self) -> None:
        """Wait until the slot is free; the kernel releases the slot of a dead rank."""
        if self.lock is not None:
            fcntl.lockf(self.lock, fcntl.LOCK_EX, 1, self.index)

    def release(self) -> None:
        if self.lock is not None:
            fcntl.lockf(self.lock, fcntl.LOCK_UN, 1, self.index)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the slot inside the `with`, where nothing may wait for another rank."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def follow(self, model: nn.Module) -> None:
        """Hold the slot during each forward and backward pass of `model`, the inner module.

        Not of its wrapper: DistributedDataParallel waits for the other ranks before it calls the model, and after the
        last gradient, which is the first trained parameter's.
        """
        if self.lock is None:
            return
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        def begin(model: nn.Module, given: Any) -> None:
            if torch.is_grad_enabled():
                self.acquire()

        def end(parameter: Tensor) -> None:
            self.release()

        model.register_forward_pre_hook(begin)
        first.register_post_accumulate_grad_hook(end)  # type: ignore[no-untyped-call]


def agree_on_compute_slot(
    spec: TrainSpec, host: Host | None, *, image_size: int, cores: int | None = None
) -> ComputeSlot:
    """Have the ranks of each host agree on how many of them compute at a time; every rank must take part.

    `cores`: those of the host; None: count them.
    Raises: ClusterddpError: the memory that is free does not hold them, even one at a time.
    """
    if host is None:
        return ComputeSlot()
    is_first = host.index == 0
    free = host.gather(free_bytes() or 0)[host.ranks[0]]
    cores = host.gather(cores or _count_cores(host))[host.ranks[0]]
    threads = torch.get_num_threads()
    need = training_memory(spec.to_json(), image_size=image_size)
    at_once = plan_turns(len(host.ranks), threads=threads, cores=cores, need=need, free=free)
    with host.shared_file("clusterddp-compute-slots") as (_, path):
        lock = None
        if at_once < len(host.ranks):
            # Where this rank cannot open the first rank's files, it computes without a slot.
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    returns_memory = not can_keep_steps(len(host.ranks), turns=lock is not None, need=need, free=free)
    if lock is None:
        return ComputeSlot(is_first=is_first, returns_memory=returns_memory)
    description = (
        f"{len(host.ranks)} ranks share {cores} core{'s' * (cores != 1)} and {format_bytes(free)} of free memory: "
        f"{at_once} of them compute{'s' * (at_once == 1)} at a time"
    )
    return ComputeSlot(
        lock=lock,
        index=host.index % at_once,
        is_first=is_first,
        returns_memory=returns_memory,
        description=description,
    )


def keep_freed_memory() -> None:
    """Have glibc keep the memory of a step's tensors for those of the next step; with another C library do nothing.

    Otherwise it returns to the kernel, which clears every page before it is used again (5 to 10 % of a step of
    ResNet-18, a quarter and more where ranks take turns). Source: mallopt(3).
    """
    _mallopt(_M_MMAP_MAX, 0)
    _mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Have glibc return a pass's memory to the kernel for the next rank; with another C library do nothing.

    By default it keeps blocks of up to 32 MiB, once such a block was freed. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    _mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _RETURNED_FROM_BYTES)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def _count_cores(host: Host) -> int:
    """Count the cores that the host's ranks may use; Slurm binds each to its own."""
    cores = len(set().union(*(os.sched_getaffinity(host.pids[rank]) for rank in host.ranks)))
    limit = read_cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))
