"""gloo's threads, which need the interpreter after the last collective: to be waited for before a group or Python ends.

A collective wakes whoever waits for it and lets go of its tensors afterwards, for which its thread asks for the
interpreter. In torch 2.13 it gets there too late in two ways. Who frees the group meanwhile joins that thread and holds
the interpreter: neither ever goes on (a DistributedDataParallel may hold the last reference, so that its end is the
group's). And if Python ends, the thread is unwound by pthread_exit, which C++ makes an abort: "terminate called without
an active exception".
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_LIMIT_S = 10.0
"""How long the threads may take to be done with what they have begun; a machine may be very busy."""


def await_gloo_threads() -> None:
    """Wait until all threads of gloo in this process sleep (Linux; elsewhere do nothing)."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        time.sleep(0.001)  # whoever waits for the interpreter gets it
        if time.monotonic() > deadline or not any(map(_is_busy, _threads())):
            return


def await_threads_before_destroy(distributed: ModuleType) -> None:
    """Have `torch.distributed.destroy_process_group` wait for gloo's threads; `distributed`: that module.

    After it a DistributedDataParallel may hold the last reference to the group, which is freed when the program's
    variables are. In a Python that was started for one rank that is no danger by chance: torch.optim imports
    torch._dynamo while there is a group, and so keeps the group for good. Where torch._dynamo was imported before,
    nothing does.
    """
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def await_and_destroy(*args: Any, **kwargs: Any) -> None:
        await_gloo_threads()
        destroy(*args, **kwargs)

    for module in (distributed, distributed.distributed_c10d):
        vars(module)["destroy_process_group"] = await_and_destroy


def _threads() -> list[Path]:
    try:
        return list(Path("/proc/self/task").iterdir())
    except OSError:  # no Linux
        return []


def _is_busy(thread: Path) -> bool:
    try:
        name, _, rest = (thread / "stat").read_text(errors="replace").rpartition(")")
    except OSError:  # it has ended
        return False
    return "gloo" in name and rest.split()[0] in ("R", "D")
