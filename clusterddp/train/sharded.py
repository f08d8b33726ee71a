"""Sharded states: every rank writes its part of each DTensor, and any number of ranks loads them.

What is whose, and which saved chunks a rank needs, torch.distributed.checkpoint plans. Its own files run code when they
are read and have no sums, and its collectives need numpy; so the files are those of checkpoint.py. `step-*.pt` has all
but the DTensors: a tensor on the meta device stands for each, and under `SHARDS` is where its chunks are. A shard is a
dictionary of chunks. Ranks that do not see rank 0's disk send it their shards, and it sends them shards when they load.
"""

from __future__ import annotations

import hashlib
import io
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from clusterddp.errors import ClusterddpError
from clusterddp.system.storage import retry_outage
from clusterddp.train.checkpoint import SHARDS, Shard, Store, decode, encode, shard_name, write_checkpoint, write_file
from clusterddp.train.group import Group, broadcast_bytes, gather_on_first
from clusterddp.train.host_copy import copy_to_host, leaves, map_leaves

Offset = tuple[int, ...]
Chunks = dict[tuple[str, Offset], Tensor]
"""Parts of tensors by the name of the tensor and the place of the part in it, in the host's memory."""
Row = tuple[int, Offset, Offset]
"""A chunk in the index: the rank of its shard, its place in the tensor, its shape."""
_T = TypeVar("_T")


def is_sharded(state: Any, group: Group) -> bool:
    """Say whether a state has DTensors; every rank calls it.

    Raises: ClusterddpError: the ranks have others.
    """
    names = sorted(name for name, leaf in leaves(state) if isinstance(leaf, DTensor))
    number = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:7], "big") if names else 0
    numbers = group.gather(number)
    other = next((rank for rank, theirs in enumerate(numbers) if theirs != numbers[0]), None)
    if other is not None:
        raise ClusterddpError(
            f"clusterddp.checkpoint.save: the DTensors in the state of rank {other} are not those of rank 0 "
            f"({len(names)} here)",
            hint="every rank saves a state with the same keys",
        )
    return number != 0


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], Chunks]:
    """Return a copy of a state with meta tensors in place of its DTensors, and this rank's chunks of these."""
    tensors = {name: leaf for name, leaf in leaves(state) if isinstance(leaf, DTensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors)
    items = planner.create_local_plan().items
    copies = copy_to_host([planner.resolve_data(item) for item in items])
    chunks = {(item.index.fqn, tuple(item.index.offset or ())): copy for item, copy in zip(items, copies, strict=True)}
    metas = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    rest: dict[str, Any] = copy_to_host(_replaced(state, metas))
    return rest, chunks


def write_sharded(store: Store, group: Group, rest: dict[str, Any], chunks: Chunks) -> None:
    """Write this rank's shard and, on rank 0, commit the checkpoint when all shards are written; every rank calls it.

    `group`: one of its own, for it is used in a thread while the script goes on.
    Raises: ClusterddpError: a rank could not write; it is the same error on every rank.
    """
    try:
        _write_together(store, group, rest, chunks)
    except (RuntimeError, ValueError) as error:
        raise ClusterddpError(
            "the checkpoint was not written, for the ranks no longer reach each other (a rank has ended, or "
            f"destroy_process_group came before clusterddp.checkpoint.wait): {error}"
        ) from error


def _write_together(store: Store, group: Group, rest: dict[str, Any], chunks: Chunks) -> None:
    stem = store.stem(rest["step"])
    owned = gather_on_first([(*key, tuple(chunk.shape)) for key, chunk in chunks.items()], group)
    place = _on_first(lambda: _prepare(store, stem, owned or []), group)
    if place is None:
        return
    index, probe = place
    mine = [(name, offset) for name, rows in index.items() for rank, offset, _ in rows if rank == group.rank]
    data = encode({key: chunks[key] for key in mine})
    name, content = shard_name(stem, group.rank), hashlib.sha256(data).hexdigest()
    is_seen = (store.directory / probe).exists()
    error = _try_write(store, name, data) if is_seen else ""
    rows = gather_on_first((name, content, len(data), is_seen, error), group)
    if not is_seen:
        dist.send(torch.frombuffer(data, dtype=torch.uint8), dst=0, group=group.control)

    def commit() -> None:
        errors, shards = [], []
        for rank, (file, sha256, num_bytes, was_seen, failure) in enumerate(rows or []):
            if not was_seen:
                received = bytearray(num_bytes)
                dist.recv(torch.frombuffer(received, dtype=torch.uint8), src=rank, group=group.control)
                errors.append(_try_write(store, file, received))
            errors.append(failure and f"rank {rank}: {failure}")
            shards.append(Shard(file=file, sha256=sha256, bytes=num_bytes))
        (store.directory / probe).unlink(missing_ok=True)
        if found := next(filter(None, errors), None):
            raise ClusterddpError(found)
        write_checkpoint(store, rest | {SHARDS: index}, tuple(shards))

    _on_first(commit, group)


@torch.no_grad()
def fill(
    state: dict[str, Any], into: Mapping[str, Any] | None, file: str | None, store: Store, group: Group
) -> dict[str, Any]:
    """Return a loaded state with the tensors of `into` in place of its meta tensors, filled from the shards.

    Every rank calls it; `file` is the checkpoint's, known on rank 0.
    Raises: ClusterddpError: `into` has no such tensors.
    """
    index = state.pop(SHARDS)
    metas = {name: leaf for name, leaf in leaves(state) if name in index}
    given = dict(leaves(into))
    targets = {name: given[name] for name in metas if isinstance(given.get(name), Tensor)}
    wrong = next(
        (name for name, meta in metas.items() if getattr(targets.get(name), "shape", None) != meta.shape), None
    )
    if wrong is not None:
        found = f"has the shape {tuple(targets[wrong].shape)}" if wrong in targets else "is not given"
        raise ClusterddpError(
            f"clusterddp.checkpoint.load: the checkpoint of step {state['step']} is sharded, and {wrong} of shape "
            f"{tuple(metas[wrong].shape)} {found}",
            hint="load(into={...}) fills the tensors of a state with the keys that were saved; see docs/frameworks.md",
        )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, Metadata({name: _describe(meta, index[name]) for name, meta in metas.items()}))
    wanted: dict[int, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        saved = item.storage_index
        wanted.setdefault(index[saved.fqn][saved.index or 0][0], []).append(item)
    ranks = sorted({rank for rows in index.values() for rank, *_ in rows})
    for rank, shard in _read_shards(file, wanted.keys(), ranks, store, group):
        for item in wanted[rank]:
            chunk = shard[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, start, length)
            planner.resolve_tensor(item).copy_(chunk)
    filled: dict[str, Any] = _replaced(state, targets)
    return filled


def _prepare(store: Store, stem: str, owned: list[list[Any]]) -> tuple[dict[str, Any], str] | None:
    """Return the index of a new checkpoint and the name of a file by which ranks see whether they share the disk.

    None: it is written already. Of a chunk that several ranks have, the first one writes it.
    """
    if (store.directory / f"{stem}.json").exists():
        return None
    index: dict[str, dict[Offset, Row]] = {}
    for rank, rows in enumerate(owned):
        for name, offset, shape in rows:
            chunks = index.setdefault(name, {})
            if 0 not in shape:
                chunks.setdefault(offset, (rank, offset, shape))
    probe = f".{stem}.probe-{uuid.uuid4().hex}"
    retry_outage(lambda: write_file(store, store.directory / probe, b""))
    return {name: list(chunks.values()) for name, chunks in index.items()}, probe


def _try_write(store: Store, file: str, data: bytearray | memoryview) -> str:
    """Write a shard; return the error as text."""
    try:
        retry_outage(lambda: write_file(store, store.directory / file, memoryview(data)))
    except (ClusterddpError, OSError) as error:
        return str(error)
    return ""


def _on_first(work: Callable[[], _T], group: Group) -> _T:
    """Call `work` on rank 0 and return its value, or raise its error, on every rank."""
    answer: tuple[Any, str] = (None, "")
    if group.is_first:
        try:
            answer = (work(), "")
        except (ClusterddpError, OSError) as error:
            answer = (None, str(error))
    data = broadcast_bytes(bytes(encode(answer)) if group.is_first else None, group)
    assert data is not None
    value, error_text = torch.load(io.BytesIO(data), weights_only=True)
    if error_text:
        raise ClusterddpError(error_text)
    return value  # type: ignore[no-any-return]


def _read_shards(
    file: str | None, needed: Set[int], ranks: list[int], store: Store, group: Group
) -> Iterator[tuple[int, Any]]:
    """Read the shards that this rank needs: from the disk where all ranks have them, else from rank 0, one by one."""
    stem = _on_first(lambda: Path(file or "").stem, group)
    manifest = store.directory / f"{stem}.json"
    paths = {rank: store.directory / shard_name(stem, rank) for rank in ranks}
    content = _on_first(manifest.read_text, group)
    is_here = manifest.is_file() and manifest.read_text() == content and all(paths[rank].is_file() for rank in needed)
    if all(group.gather(is_here)):
        for rank in sorted(needed):
            yield rank, torch.load(paths[rank], map_location="cpu", weights_only=True, mmap=True)
        return
    for rank in ranks:
        data = broadcast_bytes(paths[rank].read_bytes() if group.is_first else None, group)
        if data is not None and rank in needed:
            yield rank, decode(data)


def _describe(meta: Tensor, rows: list[Row]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for _, offset, shape in rows]
    return TensorStorageMetadata(TensorProperties(dtype=meta.dtype), meta.shape, chunks)


def _replaced(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a copy of a state with these tensors in place of the leaves of their names."""
    return map_leaves(tree, tensors.get)
