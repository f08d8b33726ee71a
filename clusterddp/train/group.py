"""The group of ranks: joining it, sums over it, gathering from it, agreeing on a stop.

Every helper also works for a single rank, which joins no group and sends nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

# Imported here, before there is a group: an import while there is one (torch.optim does it by torch._dynamo) keeps the
# group for good, as the default of an argument; its threads may then abort the process while Python ends (torch 2.13).
import torch.distributed.nn.functional
from torch import Tensor, nn

from clusterddp.errors import ClusterddpError
from clusterddp.network.gloo import await_gloo_threads
from clusterddp.train.device import RankVariables, choose_device

GROUP_TIMEOUT = timedelta(minutes=30)  # a rank may wait while another one's host downloads the data set
NCCL_TIMEOUT = timedelta(minutes=10)  # its operations begin when all ranks have their data

_SAVE, _STOP = 1, 2
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that train together, seen from one of them."""

    rank: int
    world_size: int
    device: torch.device
    on_one_host: bool = False
    control: dist.ProcessGroup | None = None
    """A gloo group over the CPU for small messages beside the gradients; None for a single rank."""
    host_ranks: tuple[int, ...] = ()
    """The ranks of this one's host, which see each other's processes."""
    pids: tuple[int, ...] = ()
    """The process of each rank, on Linux."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def host_index(self) -> int:
        """The place of this rank among those of its host."""
        return self.host_ranks.index(self.rank)

    def gather(self, value: int) -> tuple[int, ...]:
        """Return the ranks' numbers, by rank; it waits until all ranks call it."""
        if self.world_size == 1:
            return (value,)
        own = torch.tensor([value])
        rows: list[Tensor] = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self.control)
        return tuple(int(row) for row in rows)


def join_group(variables: RankVariables) -> Group:
    """Choose this rank's device and join the other ranks at the rendezvous that `variables` name.

    Raises: ClusterddpError: the rank has no GPU of its own, or one that NCCL takes from no two ranks.
    """
    group = Group(rank=variables.rank, world_size=variables.world_size, device=choose_device(variables))
    if variables.world_size > 1:
        control = _meet(variables, group.device)
        group = replace(group, on_one_host=variables.on_one_host, control=control)
    # The number of this boot of the host and of this process's pid namespace.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")
    hosts = group.gather((int(boot, 16) ^ os.stat("/proc/self/ns/pid").st_ino) & (2**62 - 1))
    here = tuple(rank for rank, host in enumerate(hosts) if host == hosts[group.rank])
    return replace(group, host_ranks=here, pids=group.gather(os.getpid()))


def _meet(variables: RankVariables, device: torch.device) -> dist.ProcessGroup:
    """Make the process group of several ranks, and return the one for small messages."""
    by_nccl = variables.backend == "nccl"
    try:
        dist.init_process_group(
            variables.backend,
            init_method=variables.init_method,
            rank=variables.rank,
            world_size=variables.world_size,
            timeout=NCCL_TIMEOUT if by_nccl else GROUP_TIMEOUT,
            device_id=device if by_nccl else None,
        )
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ClusterddpError(
            f"rank {variables.rank}: NCCL takes no two ranks on one GPU, or on slices (MIG) of one",
            hint="one rank for each GPU; or network.backend: gloo, which carries the gradients of slices, too",
        ) from error
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    return control


def take_group() -> Group:
    """Make a `Group` of the process group that a script has joined; every rank calls this at the same point."""
    if not (dist.is_available() and dist.is_initialized()):
        return Group(rank=0, world_size=1, device=torch.device("cpu"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if world_size > 1 else None
    return Group(rank=rank, world_size=world_size, device=torch.device("cpu"), control=control)


def leave_group(group: Group) -> None:
    """Destroy the process group; after an exception a rank must not call this but end at once."""
    if group.world_size > 1:
        await_gloo_threads()
        dist.destroy_process_group()


def sum_over_ranks(values: Tensor, group: Group) -> Tensor:
    """Add up `values` over the ranks, in place."""
    if group.world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_of_each(values: Tensor, group: Group) -> Tensor:
    """Return the greatest of the ranks' values in each place of a tensor on the CPU, which is changed in place."""
    if group.world_size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group.control)
    return values


def max_over_ranks(value: float, group: Group) -> float:
    """Return the greatest of the ranks' values; it waits until all ranks call it."""
    return max_of_each(torch.tensor(value, dtype=torch.float64), group).item()


def min_over_ranks(value: float, group: Group) -> float:
    """Return the least of the ranks' values; it waits until all ranks call it."""
    return -max_over_ranks(-value, group)


def mean_over_ranks(tensors: Sequence[Tensor], group: Group) -> None:
    """Average `tensors` over the ranks, in place and in one message."""
    if group.world_size == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(group.world_size)
    dist.all_reduce(flat)
    for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Broadcast rank 0's parameters and buffers."""
    if group.world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def ranks_apart(tensors: Sequence[Tensor], group: Group) -> list[int]:
    """List the ranks whose float32 `tensors` are not rank 0's to the bit; the same answer on every rank.

    Compared are sums of the bits as integers, which no order of adding changes.
    """
    if group.world_size == 1 or not tensors:
        return []
    own = torch.stack([tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors]).cpu()
    first = own.clone()
    dist.broadcast(first, src=0, group=group.control)
    return [rank for rank, differs in enumerate(group.gather(not own.equal(first))) if differs]


@contextlib.contextmanager
def averaged_tensors(tensors: Iterable[Tensor], group: Group) -> Iterator[None]:
    """Replace every rank's floating-point `tensors` by their mean over the ranks, inside the `with` only.

    Afterwards each rank has its own again, so that an evaluation or a checkpoint never changes later steps: a run that
    was stopped between two steps resumes exactly like one that was not. Tensors that are equal stay equal to the bit.
    """
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    if group.world_size == 1 or not floats:
        yield
        return
    own = [tensor.clone() for tensor in floats]
    mean = sum_over_ranks(torch.cat([tensor.flatten().double() for tensor in floats]), group) / group.world_size
    for tensor, values in zip(floats, torch.split(mean, [tensor.numel() for tensor in floats]), strict=True):
        tensor.copy_(values.view_as(tensor))
    try:
        yield
    finally:
        for tensor, values in zip(floats, own, strict=True):
            tensor.copy_(values)


def gather_on_first(value: _T, group: Group) -> list[_T] | None:
    """Gather one value of each rank (plain values, and tensors, which move to the CPU), by rank, on rank 0; else None.

    torch's own gather_object needs numpy.
    """
    if group.world_size == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    sizes = group.gather(buffer.tell())
    longest = max(sizes)
    own = torch.frombuffer(bytearray(buffer.getvalue().ljust(longest, b"\0")), dtype=torch.uint8)
    received = [bytearray(longest) for _ in sizes] if group.is_first else []
    slots = [torch.frombuffer(each, dtype=torch.uint8) for each in received]
    dist.gather(own, slots or None, dst=0, group=group.control)
    if not group.is_first:
        return None
    pairs = zip(received, sizes, strict=True)
    # To the CPU: otherwise rank 0 opens the GPUs of all ranks.
    return [torch.load(io.BytesIO(data[:size]), map_location="cpu", weights_only=True) for data, size in pairs]


def broadcast_bytes(data: bytes | None, group: Group) -> bytes | None:
    """Broadcast rank 0's bytes, or its None."""
    if group.world_size == 1:
        return data
    size = torch.tensor([-1 if data is None else len(data)])
    dist.broadcast(size, src=0, group=group.control)
    if size.item() < 0:
        return None
    content = bytearray(int(size)) if data is None else bytearray(data)
    if content:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0, group=group.control)
    return bytes(content)


class LateMaximum:
    """Finds the largest of the ranks' numbers, without a step that waits for it.

    The all-reduce that `begin` starts runs during a step's computation; `take` reads it one step later, so that no rank
    waits for a round trip. Every rank must call both equally often.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._number = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    def begin(self, own: int) -> None:
        self._number[0] = own
        self._pending = dist.all_reduce(self._number, op=dist.ReduceOp.MAX, group=self._group.control, async_op=True)

    def take(self, timeout: timedelta = timedelta()) -> int | None:
        """Wait for the all-reduce that is under way and return its result; None when none is.

        `timeout`: 0 for the group's own.
        """
        if self._pending is None:
            return None
        self._pending.wait(timeout)
        self._pending = None
        return int(self._number.item())


class Agreement:
    """Makes all ranks save at one step, and stop at one step: one question after a rank has seen that it is time.

    `stop_requested` asks this rank's own sources; `save_due` is asked on rank 0.
    """

    def __init__(self, group: Group, *, stop_requested: Callable[[], bool], save_due: Callable[[], bool]) -> None:
        self._stop_requested, self._save_due = stop_requested, save_due
        self._group = group
        self._late = LateMaximum(group)
        self.stopping = False
        """True once all ranks have received the request to stop."""
        self.saving = False
        """True from when all ranks know that a checkpoint is due, until it is `saved`."""

    def agreed(self) -> bool:
        """Ask again, and return whether all ranks stop here; every rank must call this equally often."""
        if self._group.world_size == 1:
            self._note(self._wish())
        else:
            self.settle()
            if not self.stopping:
                self._late.begin(self._wish())
        return self.stopping

    def agreed_now(self) -> bool:
        """Like `agreed`, but wait for the answer to the question asked now."""
        self.agreed()
        self.settle()
        return self.stopping

    def settle(self, timeout: timedelta = timedelta()) -> None:
        """Wait for the all-reduce that is under way, if one is; `timeout`: 0 for the group's own."""
        self._note(self._late.take(timeout) or 0)

    def saved(self) -> None:
        """Note that all ranks have saved; it answers the question that is under way, too."""
        self.settle()
        self.saving = False

    def _wish(self) -> int:
        if self._stop_requested():
            return _STOP
        return _SAVE if self._group.is_first and self._save_due() else 0

    def _note(self, answer: int) -> None:
        self.stopping = self.stopping or answer == _STOP
        self.saving = self.saving or answer == _SAVE
