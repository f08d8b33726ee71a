"""The ranks of one host: which they are, and the memory that they share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from clusterddp.train.data.dataset import Dataset, load_dataset
from clusterddp.train.group import Group, max_over_ranks

if TYPE_CHECKING:
    from clusterddp.spec.train import TrainSpec


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
    def shared_file(self, name: str) -> Iterator[tuple[int, str]]:
        """Make a file without a name in the memory of each host; yield its descriptor, and a path that opens it.

        The path is that of the first rank's file; where processes are hidden, other ranks cannot open it. It exists
        until every rank has left the `with`, which all of them must enter.
        """
        own = os.memfd_create(name)
        try:
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
