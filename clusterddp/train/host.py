"""The ranks of one host: which they are, the memory that they share, and the cores that they take turns at."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.facts.memory import free_bytes, read_cpu_limit
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.group import Group, max_over_ranks

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_RETURNED_FROM_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The ranks of one host, which see each other's processes."""

    group: Group
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    """Of all ranks of the group."""

    @property
    def index(self) -> int:
        """The place of this rank among those of its host."""
        return self.ranks.index(self.group.rank)

    def gather(self, value: int) -> tuple[int, ...]:
        """Return each of the group's values, by rank; it waits until all ranks of all hosts call it."""
        return _gather(value, self.group)

    @contextlib.contextmanager
    def shared_file(self, name: str, *, num_bytes: int = 0) -> Iterator[tuple[int, str]]:
        """Make a file without a name in the memory of each host; yield its descriptor, and a path that opens it.

        The path is that of the first rank's file, which has `num_bytes`, or none where the memory is too small; where
        processes are hidden, other ranks cannot open it. It exists until every rank has left the `with`, which all of
        them must enter.
        """
        own = _open_memory(name)
        try:
            if num_bytes and self.index == 0:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(own, 0, num_bytes)
            first = self.ranks[0]
            yield own, f"/proc/{self.pids[first]}/fd/{self.gather(own)[first]}"
            self.gather(0)
        finally:
            os.close(own)


def find_host(group: Group) -> Host | None:
    """Find the ranks that share this one's host; None elsewhere than on Linux. Every rank must take part."""
    if sys.platform != "linux":
        return None
    numbers, pids = _gather(_host_number(), group), _gather(os.getpid(), group)
    ranks = tuple(rank for rank, number in enumerate(numbers) if number == numbers[group.rank])
    return Host(group=group, ranks=ranks, pids=pids)


def load_once(spec: TrainSpec, group: Group, host: Host | None) -> Dataset:
    """Load the data set once for all ranks of a host, which on the CPU share it. Every rank must take part.

    Raises: ClusterddpError: what `load_dataset` raises; a GPU has no memory for it.
    """
    if host is None or len(set(host.gather(host.ranks[0]))) == group.world_size:
        own = load_dataset(spec)
        max_over_ranks(0.0, group)  # NCCL would not wait for as long as a download may take
        return own.to(group.device)
    with host.shared_file("clusterddp-dataset") as (descriptor, path):
        if host.index == 0:
            dataset = load_dataset(spec)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                torch.save(_fields(dataset), file)
        host.gather(0)  # until it is written
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
    is_first: bool = True
    """Whether this rank is the first one of its host."""
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


def agree_on_compute_slot(host: Host | None, *, cores: int | None = None) -> ComputeSlot:
    """Have the ranks of each host agree on how many of them compute at a time; every rank must take part.

    `cores`: those of the host; None: count them.
    """
    if host is None or host.group.device.type != "cpu":
        return ComputeSlot()
    cores = host.gather(cores or _count_cores(host))[host.ranks[0]]
    at_once = max(1, cores // torch.get_num_threads())
    with host.shared_file("clusterddp-compute-slots") as (_, path):
        lock = None
        if at_once < len(host.ranks):
            # Where this rank cannot open the first rank's files, it computes without a slot.
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if lock is None:
        return ComputeSlot(is_first=host.index == 0)
    description = (
        f"{len(host.ranks)} ranks share {cores} core{'s' * (cores != 1)}: "
        f"{at_once} of them compute{'s' * (at_once == 1)} at a time"
    )
    return ComputeSlot(lock=lock, index=host.index % at_once, is_first=host.index == 0, description=description)


def keep_memory_that_is_there(host: Host | None) -> None:
    """After a step: have every rank keep its memory for the next one, where the host has enough for all of them.

    A heap that is kept has holes, and others use the machine, too: what all ranks took at most must be free twice over.
    """
    if host is None or host.group.device.type != "cpu":
        return
    peaks = host.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    free = host.gather(free_bytes() or 0)[host.ranks[0]]
    if 2 * sum(peaks[rank] for rank in host.ranks) <= free:
        keep_freed_memory()


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


def _open_memory(name: str) -> int:
    """Open a file without a name, in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # A Python built for an old C library.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)  # noqa: S108 - it has no name there


def _fields(dataset: Dataset) -> dict[str, object]:
    return {field.name: getattr(dataset, field.name) for field in dataclasses.fields(dataset)}


def _gather(value: int, group: Group) -> tuple[int, ...]:
    if group.world_size == 1:
        return (value,)
    own = torch.tensor([value])
    rows: list[Tensor] = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(rows, own, group=group.control)
    return tuple(int(row) for row in rows)


def _host_number() -> int:
    """Return a number of this boot of the host and of this process's pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")
    return (int(boot, 16) ^ os.stat("/proc/self/ns/pid").st_ino) & (2**62 - 1)
