"""The deep check: the ranks of a run join, and measure what a training will depend on.

The ranks of `doctor --deep` execute this module in place of the run's entry. Each prints one line per probe, a
Finding of facts/deep_check.py. A probe that fails ends only itself; where ranks take part together, on every rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clusterddp.facts.deep_check import (
    ELSEWHERE,
    Compile,
    Compute,
    Environment,
    Finding,
    Link,
    Reduction,
    Reductions,
    Rendezvous,
    Training,
)
from clusterddp.facts.torch import find_compile_obstacle
from clusterddp.network.interface import read_links
from clusterddp.run.directory import Assignment
from clusterddp.spec.train import TrainSpec
from clusterddp.system.devices import ask_nvidia_smi
from clusterddp.train.begin import Setting, begin, prepare
from clusterddp.train.checkpoint import Store
from clusterddp.train.device import RankVariables, synchronize
from clusterddp.train.group import Group, broadcast_bytes, gather_on_first, join_group, leave_group, min_over_ranks
from clusterddp.train.host import agree_on_compute_slot, load_once
from clusterddp.train.loop import await_checkpoint, save, train_epoch
from clusterddp.train.main import read_plan, set_up_torch
from clusterddp.train.report.reporter import Reporter
from clusterddp.train.state import TrainState

_STEPS = {"cpu": 3, "cuda": 50}
_WARM_UP_STEPS = 3
_SIZES = tuple(4**power * 1024 for power in range(10))
"""Bytes of an all-reduce: 1 KiB to 256 MiB."""
_LONGEST_S = 0.25
"""An all-reduce or a message that takes longer is the last one that is measured."""
_MESSAGES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Bytes from one host to the next."""
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 4096}
_ROUNDS = 5
_SHM = "/dev/shm"  # noqa: S108
_VARIABLES = ("NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES")


def main(environ: Mapping[str, str]) -> None:
    """Measure, and print the findings."""
    assignment, variables = Assignment.from_environment(environ), RankVariables.from_environment(environ)
    probe = Probe(variables)
    probe("environment", lambda: describe_environment(variables, environ))
    began = time.perf_counter()
    group = join_group(variables)
    probe("rendezvous", lambda: Rendezvous(seconds=_since(began), backend=variables.backend, device=str(group.device)))
    probe.group = group
    probe("compute", lambda: time_product(group.device))
    if group.world_size > 1:
        probe("all_reduce", lambda: time_reductions(group))
        probe("links", lambda: measure_links(group, environ))
    spec = _spec(assignment, group)
    set_up_torch(spec, threads=environ.get("OMP_NUM_THREADS"))
    if spec.compile != "never":
        probe("compile", lambda: time_compile(group.device))
    probe("train", lambda: measure_training(spec, assignment, group))
    leave_group(group)


class Probe:
    """Runs probes, and prints their findings."""

    def __init__(self, variables: RankVariables) -> None:
        self._rank = variables.rank
        self.group: Group | None = None
        """If set, all ranks agree on whether a probe succeeded, so that they continue alike."""

    def __call__(self, name: str, measure: Callable[[], Any]) -> None:
        """Run a probe, which may find nothing (None)."""
        worked = True
        try:
            found = measure()
            if found is not None:
                self._print(name, found=found)
        except Exception as error:
            worked = False
            first = next(iter(str(error).strip().splitlines()), "")
            self._print(name, error=f"{type(error).__name__}: {first[:500]}")
        if self.group is not None and not min_over_ranks(float(worked), self.group) and worked:
            self._print(name, error=ELSEWHERE)

    def _print(self, name: str, **what: Any) -> None:
        print(Finding(rank=self._rank, host=socket.gethostname(), probe=name, **what).to_line(), flush=True)


def describe_environment(variables: RankVariables, environ: Mapping[str, str]) -> Environment:
    """Describe what this rank has: versions, its device, limits, what a compiler needs; nothing that names a user."""
    has_gpus = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if has_gpus and dist.is_nccl_available() else None  # type: ignore[no-untyped-call]
    own: dict[str, Any] = {}
    if has_gpus:
        index = variables.local_rank if variables.gpu is None else variables.gpu
        device = torch.cuda.get_device_properties(index)
        driver = ask_nvidia_smi(environ, "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        own = {
            "gpu": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_bytes": device.total_memory,
            "driver": driver or None,
        }
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if has_gpus else None,  # type: ignore[no-untyped-call]
        nccl=".".join(map(str, nccl)) if nccl else None,
        gpus=torch.cuda.device_count(),
        cores=len(os.sched_getaffinity(0)),
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm_bytes=shutil.disk_usage(_SHM).total if Path(_SHM).exists() else None,
        compile_obstacle=find_compile_obstacle(environ),
        variables={name: environ[name] for name in sorted(environ) if name.startswith(_VARIABLES)},
        topology=(ask_nvidia_smi(environ, "topo", "-m") or None) if variables.local_rank == 0 else None,
        **own,
    )


def time_reductions(group: Group) -> Reductions:
    """Time all-reduces of float32 numbers, by size."""
    rows: list[Reduction] = []
    for num_bytes in _SIZES:
        numbers = torch.ones(num_bytes // 4, device=group.device)
        times = [_time(partial(dist.all_reduce, numbers), group.device) for _ in range(_ROUNDS)]
        seconds = -min_over_ranks(-min(times), group)  # the slowest rank's best
        bus = 2 * (group.world_size - 1) / group.world_size * num_bytes / seconds / 1e9
        rows.append(Reduction(bytes=num_bytes, ms=round(1000 * seconds, 4), bus_gb_per_s=round(bus, 4)))
        if seconds > _LONGEST_S:
            break
    return Reductions(sizes=tuple(rows))


def time_product(device: torch.device) -> Compute:
    """Time a product of two square matrices."""
    size = _PRODUCT_SIZE[device.type]
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    times = [_time(partial(torch.mm, left, right), device) for _ in range(4 * _ROUNDS)]
    return Compute(ms=round(1000 * statistics.median(times[_ROUNDS:]), 3))


def measure_links(group: Group, environ: Mapping[str, str]) -> Link | None:
    """Send messages around a ring of the hosts, to the next host and back; every rank calls this.

    A host that is slow shows on both of its links, a link that is slow on one. Only the first rank of each host sends,
    and returns the link to the next host, where it has one of its own.
    """
    gathered = gather_on_first(socket.gethostname(), group)
    names = json.loads(broadcast_bytes(json.dumps(gathered).encode() if gathered else None, group) or b"[]")
    hosts, here = list(dict.fromkeys(names)), names[group.rank]
    count, found = len(hosts), None
    if count == 1 or names.index(here) != group.rank:
        return None
    # In an order in which links of different hosts are measured at the same time: every second one, then the others.
    around = [count - 1] if hosts[2:] else []  # of two hosts the way back is the same link
    for number in (*range(0, count - 1, 2), *range(1, count - 1, 2), *around):
        ends = hosts[number], hosts[(number + 1) % count]
        if here not in ends:
            continue
        leads = here == ends[0]
        latency_s, bytes_per_s = _exchange_messages(
            names.index(ends[1] if leads else ends[0]), group.device, leads=leads
        )
        if leads:
            name = environ.get("GLOO_SOCKET_IFNAME")
            rated = next((link.speed_mbit_per_s for link in read_links() if link.name == name), None)
            found = Link(
                hosts=ends,
                mbyte_per_s=round(bytes_per_s / 1e6, 1),
                latency_ms=round(1000 * latency_s, 3),
                rated_mbyte_per_s=rated / 8 if rated else None,
            )
    return found


def time_compile(device: torch.device) -> Compile:
    """Compile a small function, forward and backward."""

    def small(values: torch.Tensor) -> torch.Tensor:
        return (values.sin() * values).relu().sum()

    torch.compiler.reset()
    began = time.perf_counter()
    numbers = torch.linspace(0, 1, 64, device=device, requires_grad=True)
    value = torch.compile(small)(numbers)
    value.backward()  # type: ignore[no-untyped-call]
    if not torch.allclose(value, small(numbers)):
        raise ArithmeticError("a compiled function gives another value than the function")
    return Compile(seconds=_since(began))


def measure_training(spec: TrainSpec, assignment: Assignment, group: Group) -> Training:
    """Take steps of the trainer on noise: their time, and a checkpoint's time."""
    dataset = load_once(spec, group)
    slot = agree_on_compute_slot(group)
    store = Store(run=assignment.run, attempt=assignment.attempt.number, keep=1)
    with closing(Reporter(assignment.run, attempt=store.attempt, first=False)) as reporter:
        setting = prepare(spec, dataset, group, store=store, reporter=reporter, slot=slot)
        state = begin(setting)
        _take_steps(state, setting, _WARM_UP_STEPS)
        seconds, steps = _take_steps(state, setting, _STEPS[group.device.type])
        began = time.perf_counter()
        save(state, setting)
        await_checkpoint(state, setting)
        setting.agreement.settle()
        return Training(
            model=spec.model,
            precision=state.precision,
            batch=setting.schedule.global_batch,
            compile_s=state.compile_seconds,
            step_ms=round(1000 * seconds / steps, 3),
            images_per_s=round(steps * setting.schedule.global_batch / seconds, 1),
            checkpoint_s=_since(began),
            peak_bytes=torch.cuda.max_memory_allocated(group.device) if group.device.type == "cuda" else None,
        )


def _spec(assignment: Assignment, group: Group) -> TrainSpec:
    """Return the run's own training, or that of a spec with an entry in default values, on noise and without an end."""
    spec = TrainSpec.from_json(read_plan(assignment.run)["spec"].get("train") or {"model": "resnet18"})
    return dataclasses.replace(
        spec,
        dataset="random",
        samples=spec.batch_size * spec.accumulate * group.world_size * (_STEPS[group.device.type] + 1),
        epochs=1000,
        max_steps=None,
        checkpoint_every=1000,
        checkpoint_minutes=0,
        eval_every=1000,
        deterministic=False,
    )


def _take_steps(state: TrainState, setting: Setting, at_least: int) -> tuple[float, int]:
    """Train an epoch, or what is left of one, until `at_least` steps are done; return seconds and steps."""
    first = state.step
    synchronize(setting.group.device)
    began = time.perf_counter()
    while state.step < first + at_least:
        if not setting.schedule.left_in_epoch(state.samples_in_epoch):
            state.epoch, state.samples_in_epoch = state.epoch + 1, 0
        train_epoch(state, setting, lambda: None)
    setting.agreement.settle()
    synchronize(setting.group.device)
    return time.perf_counter() - began, state.step - first


def _exchange_messages(peer: int, device: torch.device, *, leads: bool) -> tuple[float, float]:
    """Exchange messages with another rank; return the seconds of the smallest one, and bytes/s of the largest one."""

    def exchange(numbers: torch.Tensor) -> None:
        for sends in (leads, not leads):
            (dist.send if sends else dist.recv)(numbers, peer)

    small = torch.ones(1, device=device)
    latency_s = min(_time(partial(exchange, small), device) for _ in range(_ROUNDS)) / 2
    num_bytes, took = 0, small
    for num_bytes in _MESSAGES:
        numbers = torch.ones(num_bytes // 4, device=device)
        took = small.fill_(min(_time(partial(exchange, numbers), device) for _ in range(_ROUNDS)) / 2)
        (dist.send if leads else dist.recv)(took, peer)  # both continue alike
        if took.item() > _LONGEST_S / 2:
            break
    return latency_s, num_bytes / took.item()


def _time(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from when `device` is idle until it has done `action`."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


if __name__ == "__main__":
    main(os.environ)
