"""Turns: where a host's ranks outnumber its cores, or its memory, only some of them compute at a time.

A step's forward and backward pass needs many times the memory of what a rank keeps between steps. Sixteen ranks on two
cores are not faster for doing it all at once, so two of them do, and what they allocate is given back before the next
two begin. The arithmetic is that of ranks which compute together, to the bit. Nothing in a turn waits for another rank.
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
from clusterddp.facts.training_memory import plan_turns, training_memory
from clusterddp.system.byte_sizes import format_bytes
from clusterddp.train.host import Host

if TYPE_CHECKING:
    from clusterddp.train.spec import TrainSpec

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_GIVEN_BACK_FROM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Turns:
    """A rank's turns at computing; `lock` is None where all ranks of the host compute at once."""

    lock: int | None = None
    """A file that the host's ranks lock a byte of, each its slot's."""
    slot: int = 0
    is_first: bool = True
    """Whether this rank is the first one of its host."""
    words: str = ""
    """How the ranks of rank 0's host take turns, for the log."""

    def take(self) -> None:
        """Wait until the rank that has this one's slot has computed; the kernel gives up the slot of a dead rank."""
        if self.lock is not None:
            fcntl.lockf(self.lock, fcntl.LOCK_EX, 1, self.slot)

    def leave(self) -> None:
        if self.lock is not None:
            fcntl.lockf(self.lock, fcntl.LOCK_UN, 1, self.slot)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Compute in a turn. Nothing inside may wait for another rank."""
        self.take()
        try:
            yield
        finally:
            self.leave()

    def follow(self, model: nn.Module) -> None:
        """Take a turn for each forward and backward pass of `model`, the inner one.

        Not of what wraps it: DistributedDataParallel waits for the other ranks before it calls the model, and after the
        last gradient, which is the first trained parameter's.
        """
        if self.lock is None:
            return
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        def begin(model: nn.Module, given: Any) -> None:
            if torch.is_grad_enabled():
                self.take()

        def end(parameter: Tensor) -> None:
            self.leave()

        model.register_forward_pre_hook(begin)
        first.register_post_accumulate_grad_hook(end)  # type: ignore[no-untyped-call]


def agree_on_turns(spec: TrainSpec, host: Host | None, *, image_size: int, cores: int | None = None) -> Turns:
    """Have the ranks of each host agree on how many of them compute at a time; every rank must take part.

    `cores`: those of the host; None: count them.
    Raises: ClusterddpError: the memory that is free does not hold them, even one at a time.
    """
    if host is None:
        return Turns()
    is_first = host.index == 0
    free = host.gather(free_bytes() or 0)[host.ranks[0]]
    cores = host.gather(cores or _count_cores(host))[host.ranks[0]]
    threads = torch.get_num_threads()
    need = training_memory(spec.to_json(), image_size=image_size)
    at_once = plan_turns(len(host.ranks), threads=threads, cores=cores, need=need, free=free)
    with host.shared_file("clusterddp-turns") as (_, path):
        lock = None
        if at_once < len(host.ranks):
            # Where the first rank's files are hidden from this one, it does not wait for its turn.
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if lock is None:
        return Turns(is_first=is_first)
    words = (
        f"{len(host.ranks)} ranks share {cores} core{'s' * (cores != 1)} and {format_bytes(free)} of free memory: "
        f"{at_once} of them compute{'s' * (at_once == 1)} at a time"
    )
    return Turns(lock=lock, slot=host.index % at_once, is_first=is_first, words=words)


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a step's tensors leave for those of the next step; elsewhere do nothing.

    Else all of it goes back to the kernel, which clears every page before it gives it out again (5 to 10 % of a step of
    ResNet-18). Source: mallopt(3).
    """
    _mallopt(_M_MMAP_MAX, 0)
    _mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Have glibc give back what a turn has used, for the next rank's turn; elsewhere do nothing.

    By itself it keeps blocks of up to 32 MiB, once such a block was freed. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    _mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_FROM_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _GIVEN_BACK_FROM_BYTES)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def _count_cores(host: Host) -> int:
    """Count the cores that the host's ranks may use; Slurm binds each to its own."""
    cores = len(set().union(*(os.sched_getaffinity(host.pids[rank]) for rank in host.ranks)))
    limit = read_cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))
