"""Exact gradients through shared memory, for ranks that are on one host and compute on its CPU."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.train.exchange import Exchange
from clusterddp.train.group import Group, broadcast_bytes, broadcast_model, min_over_ranks

_PROOF_BYTES = 64  # keeps what follows on a cache line of its own


class SharedMemory(Exchange):
    """Exact: each rank copies its gradients into shared memory, and computes the mean of its share of them for all.

    Each rank computes on its own cores, so sending cannot overlap with computation; the cost is the number of copies of
    a gradient. Through gloo's sockets it is copied into the kernel and out again, twice.
    """

    transport = "memory that all ranks see"

    def __init__(self, model: nn.Module, group: Group, memory: Tensor) -> None:
        """Rank 0's parameters replace those of all ranks. `memory`: from `share_memory`."""
        super().__init__(model, group)
        broadcast_model(model, group)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own, mean = memory[group.rank], memory[-1]
        self._own, self._mean = _views(own, self._trained), _views(mean, self._trained)
        length = -(-memory.shape[1] // group.world_size)
        share = slice(group.rank * length, (group.rank + 1) * length)
        self._shares, self._mean_of_shares = memory[:-1, share], mean[share]

    def after_backward(self) -> None:
        """Make every gradient the mean over the ranks; it is shared by all ranks, so nothing may write into it."""
        torch._foreach_copy_(self._own, [each.grad for each in self._trained if each.grad is not None])
        dist.barrier(group=self._group.control)
        torch.sum(self._shares, dim=0, out=self._mean_of_shares).div_(self._group.world_size)
        dist.barrier(group=self._group.control)
        for parameter, mean in zip(self._trained, self._mean, strict=True):
            parameter.grad = mean


def share_memory(model: nn.Module, group: Group) -> Tensor | None:
    """Map memory for the gradients of `model` that all ranks see: float32, [ranks + 1, values].

    None on every rank where one of them cannot: the ranks are on several hosts or on GPUs, the system is not Linux, or
    processes are hidden from each other. The memory has no name, and goes with the last rank.
    """
    if not group.on_one_host or group.device.type != "cpu" or sys.platform != "linux":
        return None
    values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rows = group.world_size + 1
    with _made(_PROOF_BYTES + 4 * rows * values) if group.is_first else contextlib.nullcontext() as made:
        received = broadcast_bytes(json.dumps(made).encode() if group.is_first else None, group)
        assert received is not None
        path, proof = json.loads(received) or ("", "")
        mapped = _map(path, bytes.fromhex(proof), _PROOF_BYTES // 4 + rows * values)
        all_mapped = min_over_ranks(mapped is not None, group)
    return None if mapped is None or not all_mapped else mapped[_PROOF_BYTES // 4 :].view(rows, values)


@contextlib.contextmanager
def _made(size: int) -> Iterator[tuple[str, str] | None]:
    """Make memory of `size` bytes that has a path while the `with` lasts; yield that, and the hex of its first bytes.

    A pid may mean another process in another pid namespace: a rank compares the first bytes.
    """
    made = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = _open_memory()
            stack.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size)  # a lack of memory shows here, not as a signal in a step
            proof = secrets.token_bytes(_PROOF_BYTES)
            os.pwrite(descriptor, proof, 0)
            made = f"/proc/{os.getpid()}/fd/{descriptor}", proof.hex()
        yield made


def _open_memory() -> int:
    """Open a file without a name, in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("clusterddp-gradients")
    # A Python built for an old C library.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)  # noqa: S108 - it has no name there


def _map(path: str, proof: bytes, values: int) -> Tensor | None:
    try:
        with open(path, "rb") as file:
            if not proof or file.read(len(proof)) != proof:
                return None
        return torch.from_file(path, shared=True, size=values, dtype=torch.float32)
    except (OSError, RuntimeError):
        return None


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Cut `flat` [values] into tensors of the parameters' shapes, each laid out in memory as its parameter is."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [
        piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
        for piece, parameter in zip(pieces, parameters, strict=True)
    ]
