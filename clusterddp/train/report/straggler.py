"""Stragglers: which rank slows the others down, on which host, and why as far as is known."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from clusterddp.system.devices import NVIDIA_SMI_TIMEOUT_S
from clusterddp.train.group import Group, gather_on_first

TOO_SLOW = 1.25
"""Times the others' median, from which on a rank is a straggler."""
_REASONS = {
    "hw_thermal_slowdown": "it is too hot",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "its power supply brakes it",
    "hw_slowdown": "its hardware slows it down",
    "sw_power_cap": "it is at its power limit",
}
_ASKS = 5
"""In how many windows after the report the ranks look for its reason again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that needs `ratio` times as long for its steps as the median of the others."""

    rank: int
    host: str
    ratio: float


class StragglerWatch:
    """Reports a rank that is too slow for two windows in a row, and when it no longer is.

    nvidia-smi, which has the reason, may take seconds. A rank calls it in a thread when it is slow for the first time;
    a reason that comes after the report is reported with one of the next windows.
    """

    def __init__(self, group: Group, ask: Callable[[], str] | None = None) -> None:
        """`ask` returns why this rank may be slow, and may take seconds; None: the default for its device."""
        self._group = group
        self._suspect: int | None = None
        self._ask = ask or (partial(ask_gpu, group.device) if group.device.type == "cuda" else None)
        self._answer = ""
        self._asks_left = 0
        self._explained = False
        self.named: Straggler | None = None
        """The rank that is a straggler now, with its newest ratio; `host` is known on rank 0."""

    def look(self, busy_ms: list[float]) -> str | None:
        """Judge a window by each rank's time for a step; return a message for the log, on rank 0.

        Every rank must pass the same numbers: when a straggler is found, all take part in a gather.
        """
        rank, ratio = find_slowest(busy_ms)
        slow = rank if ratio >= TOO_SLOW else None
        confirmed, suspected = slow is not None and slow == self._suspect, self._suspect
        self._suspect = slow
        if slow == self._group.rank and slow != suspected:
            self._begin_to_ask()
        before = self.named
        if slow is not None and before is not None and before.rank == slow:
            self.named = Straggler(rank=slow, host=before.host, ratio=ratio)
            return self._ask_again(self.named)
        if slow is not None and confirmed:
            host, reason = self._gather(slow)
            self._asks_left = _ASKS if self._ask else 0
            self._explained = bool(reason)
            self.named = Straggler(rank=slow, host=host, ratio=ratio)
            others = statistics.median(busy_ms[:slow] + busy_ms[slow + 1 :])
            times = f"{busy_ms[slow]:,.1f} ms a step, {ratio:.2f} times the others' {others:,.1f} ms"
            return f"straggler: rank {slow} on {host} takes {times}{reason and f'; {reason}'}"
        if slow is None and before is not None:
            self.named = None
            return f"rank {before.rank} on {before.host} is no straggler any more"
        return None

    def _begin_to_ask(self) -> None:
        self._answer = ""
        if self._ask is None:
            self._answer = ask_load()
            return
        ask = self._ask

        def answer() -> None:
            self._answer = ask()

        threading.Thread(target=answer, name="straggler", daemon=True).start()

    def _ask_again(self, named: Straggler) -> str | None:
        """Return the reason that was not known at the report of `named`; all ranks call this equally often."""
        if not self._asks_left:
            return None
        self._asks_left -= 1
        _, reason = self._gather(named.rank)
        if not reason or self._explained:
            return None
        self._explained = True
        return f"straggler: rank {named.rank} on {named.host}: {reason}"

    def _gather(self, rank: int) -> tuple[str, str]:
        """Gather the host of `rank` and its reason on rank 0; blank elsewhere."""
        own = (socket.gethostname(), self._answer) if self._group.rank == rank else ("", "")
        gathered = gather_on_first(own, self._group)
        return gathered[rank] if gathered else ("", "")


def find_slowest(busy_ms: list[float]) -> tuple[int, float]:
    """Return the slowest rank, and how many times as long as the median of the other ranks it takes."""
    rank = max(range(len(busy_ms)), key=busy_ms.__getitem__)
    others = busy_ms[:rank] + busy_ms[rank + 1 :]
    median = statistics.median(others) if others else busy_ms[rank]
    return rank, busy_ms[rank] / median if median > 0 else 1.0


def ask_gpu(device: torch.device) -> str:
    """Describe why a GPU may be slow; blank when that is not known. It may take seconds."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return ask_throttling(["-i", f"GPU-{uuid}"] if uuid else [])


def ask_throttling(which: list[str]) -> str:
    """Ask nvidia-smi, with the options that select a GPU, whether it is slowed down; blank when it does not answer."""
    fields = ["clocks.sm", "clocks.max.sm", "temperature.gpu", *(f"clocks_throttle_reasons.{key}" for key in _REASONS)]
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", *which],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
        return read_throttling(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""  # best effort: the straggler is reported either way


def read_throttling(answer: str) -> str:
    """Describe a row of nvidia-smi: clock now, clock at most, temperature, then whether each reason is active."""
    clock, most, celsius, *active = [value.strip() for value in answer.split(",")]
    reasons = [reason for reason, state in zip(_REASONS.values(), active, strict=False) if state == "Active"]
    why = f"its GPU is slowed down: {', '.join(dict.fromkeys(reasons))}" if reasons else "its GPU is not slowed down"
    return f"{why} ({clock} of {most}, {celsius} C)"


def ask_load() -> str:
    """Describe the load of this host if it is above the number of cores; else blank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    return f"its host has a load of {load:.1f} on {cores} cores" if load > cores else ""
