"""GPUs that are not there: tensors that say cuda:N compute on the CPU, and what a program does to a GPU is counted.

Import it before torch, then call `install`. README.md says what this cannot show.
"""

from __future__ import annotations

import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.sim_cuda.driver import load

load()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.weak import WeakTensorKeyDictionary  # noqa: E402

_NO_KERNEL = {"_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"}
_HOST_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
"""What has its answer, or the shape of its answer, on the host."""
_MIXES_DEVICES = {"_to_copy", "copy_", "index", "index_put_", "_index_put_impl_"}


@dataclass(kw_only=True)
class Counts:
    """What was done to GPUs: kernel launches by operator; waits and copies by what they are and the line they are in.

    An operator that is no view counts as one launch. Waiting copies count as waits only.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Counts:
        return Counts(**{name: Counter(values) for name, values in vars(self).items()})

    def since(self, before: Counts) -> Counts:
        return Counts(**{name: values - getattr(before, name) for name, values in vars(self).items()})


counts = Counts()
contexts: set[int] = set()
"""The GPUs on which this process has allocated anything."""
_pinned = WeakTensorKeyDictionary()
_nccl_groups: set[str] = set()


class SimTensor(torch.Tensor):
    """A tensor on cuda:N whose elements are in `inner`, on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> SimTensor:
        contexts.add(index)
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cuda", index),
        )

    def __init__(self, inner: Tensor, index: int) -> None:
        self.inner = inner
        inner.untyped_storage().sim_index = index  # type: ignore[attr-defined]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({self.inner!r}, device={str(self.device)!r})"

    def tolist(self) -> Any:
        _note(counts.waits, "tolist")
        return self.inner.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        _note(counts.waits, "save")
        return self.inner.detach().__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["inner"], self.device.index

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], index: int, size: Any, stride: Any) -> SimTensor:
        return SimTensor(inner["inner"], index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Everywhere(TorchDispatchMode):
    """Sees what makes a tensor on a GPU out of nothing, or sends one of the CPU to other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_gpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if on_gpu or kwargs.get("pin_memory") or func.namespace == "c10d" or _sims(_leaves(args, kwargs)):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _leaves(*values: Any) -> list[Any]:
    """List what is within tuples, lists and dicts: an operator takes no other containers.

    torch.utils._pytree, which knows more kinds, takes three times as long, of everything here.
    """
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _leaves(*value)
        elif isinstance(value, dict):
            found += _leaves(*value.values())
        else:
            found.append(value)
    return found


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with `function` applied to what `_leaves` yields."""
    if isinstance(value, tuple | list):
        return type(value)(_map(function, each) for each in value)
    if isinstance(value, dict):
        return {name: _map(function, each) for name, each in value.items()}
    return function(value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, and count what a GPU would have had to do."""
    leaves, target = _leaves(args, kwargs), kwargs.get("device")
    sims = _sims(leaves)
    target = None if target is None else torch.device(target)
    _check_devices(func, args, leaves, sims)
    if func.overloadpacket.__name__ == "record_stream":
        return None
    index = _index_of(sims, target)
    _count(func, args, kwargs, sims, index)
    kwargs = dict(kwargs)
    pin = kwargs.pop("pin_memory", None)
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    given = {id(_inner(each)): each for each in leaves if isinstance(each, Tensor)}
    shapes = [sim.shape for sim in sims]
    done = func(*_map(_inner, args), **_map(_inner, kwargs))
    assert shapes == [sim.inner.shape for sim in sims], f"{func} changed the shape of a tensor: not emulated"
    if index is None:
        if func.overloadpacket.__name__ == "_to_copy" and sims:
            done = done.clone() if done.untyped_storage()._cdata == sims[0].inner.untyped_storage()._cdata else done
            pin = kwargs.get("non_blocking")  # torch copies into pinned memory then
        if pin:
            _pinned[done] = True
        return done

    def place(each: Any) -> Any:
        """Return the tensor that was given, where the operator works in place, or a new one."""
        if not isinstance(each, Tensor):
            return each
        return given[id(each)] if id(each) in given else SimTensor(each, index)

    return _map(place, done)


def _index_of(sims: list[SimTensor], target: torch.device | None) -> int | None:
    """Return which GPU has the result; None for the CPU."""
    if target is not None:
        if target.type != "cuda":
            return None
        return torch.cuda.current_device() if target.index is None else target.index
    return sims[0].device.index if sims else None


def _check_devices(func: Any, args: Any, leaves: list[Any], sims: list[SimTensor]) -> None:
    name = func.overloadpacket.__name__
    others = [each for each in leaves if isinstance(each, Tensor) and type(each) is not SimTensor]
    if func.namespace == "c10d":
        if others and any(group in _nccl_groups for group in _groups(args)):
            raise RuntimeError(f"No backend type associated with device type cpu: {func}")
        return
    mixed = [each for each in others if each.ndim and not _on_gpu(each)] if sims and name not in _MIXES_DEVICES else []
    if mixed or (len({sim.device.index for sim in sims}) > 1 and name not in ("_to_copy", "copy_")):
        where = {str(each.device) for each in (*sims, *mixed)}
        raise RuntimeError(f"Expected all tensors to be on the same device, found {sorted(where)}: {func}")


def _groups(args: Any) -> Iterator[str]:
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                yield dist.ProcessGroup.unbox(each).group_name
            except (RuntimeError, TypeError):
                continue


def _count(func: Any, args: Any, kwargs: dict[str, Any], sims: list[SimTensor], index: int | None) -> None:
    name = func.overloadpacket.__name__
    if func.namespace == "c10d":
        if sims:
            counts.collectives[name] += 1
        return
    source, into = _copied(name, args, sims, index)
    if source != into:
        # Without waiting: up in any case, down into pinned memory, in which `to` has its answer.
        asked = kwargs.get("non_blocking") or args[2:3] == (True,)
        waits = not asked or (name == "copy_" and source == "cuda" and args[0] not in _pinned)
        _note(counts.waits if waits else counts.copies, f"{name} {source} -> {into}")
    elif name in _HOST_WAITS:
        _note(counts.waits, name)
    elif sims or index is not None:
        if name == "index" and any(isinstance(each, Tensor) and not _on_gpu(each) for each in args[1]):
            _note(counts.waits, "index by a tensor of the CPU")
        if name.startswith("index") and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]):
            _note(counts.waits, f"{name} by a mask")
        onto_itself = name == "copy_" and _inner(args[0]).data_ptr() == _inner(args[1]).data_ptr()  # gloo's answer
        if not func.is_view and name not in _NO_KERNEL and not onto_itself:
            counts.launches[name] += 1


def _copied(name: str, args: Any, sims: list[SimTensor], index: int | None) -> tuple[str, str]:
    """Return the kinds of device from which and to which this copies; twice the same where it crosses no border."""
    kinds = {True: "cuda", False: "cpu"}
    if name == "copy_" and not (args[1].ndim == 0 and not _on_gpu(args[1])):  # a number goes along with the launch
        return kinds[_on_gpu(args[1])], kinds[_on_gpu(args[0])]
    if name == "_to_copy":
        return kinds[bool(sims)], kinds[index is not None]
    return "", ""


def _on_gpu(tensor: Tensor) -> bool:
    """Say whether a tensor is on a GPU, be it that gloo or torch.save has only its inner part."""
    return type(tensor) is SimTensor or hasattr(tensor.untyped_storage(), "sim_index")


def _note(where: Counter[str], what: str) -> None:
    """Count something, with the innermost line of the trainer that led to it."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        file = frame.f_code.co_filename
        if "/clusterddp/" in file and "/tests/" not in file:
            where[f"{what} at {file.rsplit('/clusterddp/')[-1]}:{line}"] += 1
            return
    where[what] += 1


def _sims(leaves: list[Any]) -> list[SimTensor]:
    return [each for each in leaves if type(each) is SimTensor]


def _inner(each: Any) -> Any:
    return each.inner if type(each) is SimTensor else each


class _Event:
    """A mark in a stream: work is done when it is queued, so the time is the host's."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return 1000 * (other._at - self._at)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        _note(counts.waits, "Event.synchronize")


class _Stream:
    """A stream besides the default one, whose work is done when it is queued."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = record_event = wait_stream

    def synchronize(self) -> None:
        _note(counts.waits, "Stream.synchronize")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def install(*, gpus: int = 8, name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0)) -> None:
    """Have this process see `gpus` GPUs of that name, and a backend nccl, which is gloo."""
    cuda = torch.cuda
    current = [0]
    properties = types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        uuid="sim",
        total_memory=80 << 30,
    )
    bf16 = lambda including_emulation=True: including_emulation or capability[0] >= 8  # noqa: E731
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpus,
        "current_device": lambda: current[0],
        "set_device": lambda device: current.__setitem__(0, torch.device(device).index),
        "synchronize": lambda device=None: _note(counts.waits, "cuda.synchronize"),
        "get_device_name": lambda device=None: name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "can_device_access_peer": lambda device, peer: True,
        "max_memory_allocated": lambda device=None: 1 << 30,
        "is_bf16_supported": bf16,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": lambda stream: stream or _Stream(),
    }
    for key, value in replaced.items():
        setattr(cuda, key, value)
    setattr(Tensor, "pin_memory", lambda tensor: _pinned.__setitem__(tensor, True) or tensor)  # noqa: B010
    setattr(Tensor, "is_pinned", lambda tensor: tensor in _pinned)  # noqa: B010
    torch.serialization.register_package(0, _location, _open_location)
    _Everywhere().__enter__()
    dist.init_process_group = _init_process_group


def _location(storage: Any) -> str | None:
    index = getattr(storage, "sim_index", None)
    return None if index is None else f"cuda:{index}"


def _open_location(storage: Any, location: str) -> Any:
    """Read what lay on a GPU: that GPU gets a context. The tensor comes back on the CPU, unlike CUDA's."""
    if not location.startswith("cuda"):
        return None
    contexts.add(torch.device(location).index or 0)
    return storage


def _init_process_group(backend: str, *, device_id: Any = None, **options: Any) -> None:
    _gloo(backend="gloo", **options)
    if backend == "nccl":
        assert dist.group.WORLD is not None
        _nccl_groups.add(dist.group.WORLD.group_name)


_gloo = dist.init_process_group
