"""The ranks of one host: which they are, the memory that they share, and the cores that they take turns at."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clusterddp.facts.memory import free_bytes, read_cpu_limit
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.group import Group, max_over_ranks

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_RETURNED_FROM_BYTES = 1 << 20


@contextlib.contextmanager
def shared_file(group: Group, name: str, *, num_bytes: int = 0) -> Iterator[tuple[int, str]]:
    """Make a file without a name in the memory of each host; yield its descriptor, and a path that opens it.

    The path is that of the first rank's file, which has `num_bytes`, or none where the memory is too small; where
    processes are hidden, other ranks cannot open it. It exists until every rank has left the `with`, which all of
    them must enter.
    """
    if hasattr(os, "memfd_create"):
        own = os.memfd_create(name)
    else:  # a Python built for an old C library
        own = os.open("/dev/shm", os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)  # noqa: S108 - it has no name there
    try:
        if num_bytes and group.host_index == 0:
            with contextlib.suppress(OSError):
                os.posix_fallocate(own, 0, num_bytes)
        first = group.host_ranks[0]
        yield own, f"/proc/{group.pids[first]}/fd/{group.gather(own)[first]}"
        group.gather(0)
    finally:
        os.close(own)


def load_once(spec: TrainSpec, group: Group) -> Dataset:
    """Load the data set once for all ranks of a host, which on the CPU share it. Every rank must take part."""
    if not group.host_ranks or len(set(group.gather(group.host_ranks[0]))) == group.world_size:
        own = load_dataset(spec)
        max_over_ranks(0.0, group)  # NCCL would not wait for as long as a download may take
        return own.to(group.device)
    with shared_file(group, "clusterddp-dataset") as (descriptor, path):
        if group.host_index == 0:
            dataset = load_dataset(spec)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                torch.save({field.name: getattr(dataset, field.name) for field in dataclasses.fields(dataset)}, file)
        group.gather(0)  # until it is written
        try:
            return Dataset(**torch.load(path, mmap=True, weights_only=True)).to(group.device)
        except OSError:  # this rank cannot open the first rank's files
            return load_dataset(spec).to(group.device)


@dataclass(frozen=True, slots=True)
class ComputeSlot:
    """Where a host's ranks outnumber its cores, only as many compute at a time as there are cores: one for each slot.

    A step's forward and backward pass needs many times the memory of what a rank keeps between steps. Sixteen ranks on
    two cores are not faster when all compute at once. So two compute at a time, and each returns its memory before the
    next begins, unless there is enough for all. The results are the same to the last bit. A rank that holds a slot
    never waits for another rank.
    """

    lock: int | None = None
    """A file in which each rank of the host locks one byte, that of its slot; None: all compute at once."""
    index: int = 0
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


def agree_on_compute_slot(group: Group, *, cores: int | None = None) -> ComputeSlot:
    """Have the ranks of each host agree on how many of them compute at a time; every rank must take part.

    `cores`: those of the host; None: count those that its ranks may use (Slurm binds each to its own).
    """
    ranks = group.host_ranks
    if not ranks or group.device.type != "cpu":
        return ComputeSlot()
    if cores is None:
        cores = len(set().union(*(os.sched_getaffinity(group.pids[rank]) for rank in ranks)))
        limit = read_cpu_limit()
        cores = cores if limit is None else max(1, min(cores, int(limit)))
    cores = group.gather(cores)[ranks[0]]
    at_once = max(1, cores // torch.get_num_threads())
    with shared_file(group, "clusterddp-compute-slots") as (_, path):
        lock = None
        if at_once < len(ranks):
            # Where this rank cannot open the first rank's files, it computes without a slot.
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if lock is None:
        return ComputeSlot()
    description = (
        f"{len(ranks)} ranks share {cores} core{'s' * (cores != 1)}: "
        f"{at_once} of them compute{'s' * (at_once == 1)} at a time"
    )
    return ComputeSlot(lock=lock, index=group.host_index % at_once, description=description)


def keep_memory_that_is_there(group: Group) -> None:
    """After a step: have every rank keep its memory for the next one, where the host has enough for all of them.

    A heap that is kept has holes, and others use the machine, too: what all ranks took at most must be free twice over.
    Otherwise it returns to the kernel, which clears every page before it is used again (5 to 10 % of a step of
    ResNet-18, a quarter and more where ranks take turns). Source: mallopt(3).
    """
    if not group.host_ranks or group.device.type != "cpu":
        return
    peaks = group.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    free = group.gather(free_bytes() or 0)[group.host_ranks[0]]
    if 2 * sum(peaks[rank] for rank in group.host_ranks) <= free:
        _mallopt(_M_MMAP_MAX, 0)
        _mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Return a pass's memory to the kernel for the next rank.

    By default glibc keeps blocks of up to 32 MiB, once one was freed. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    _mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _RETURNED_FROM_BYTES)


def _mallopt(option: int, value: int) -> None:
    """Set an option of glibc; do nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
