"""Wait for gloo's threads, which need the interpreter after the last collective, before a group or Python ends.

A gloo thread wakes the waiting caller first and frees the collective's tensors afterwards, for which it takes the
interpreter lock. In torch 2.13 this fails in two ways. A caller that frees the group meanwhile joins the thread with
the lock held: a deadlock (a DistributedDataParallel may hold the last reference to the group). And if Python ends,
pthread_exit unwinds the thread, and C++ aborts: "terminate called without an active exception".
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_LIMIT_S = 10.0
"""How long the threads may take to finish; a machine may be very busy."""


def await_gloo_threads() -> None:
    """Wait until all threads of gloo in this process sleep."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        time.sleep(0.001)  # a thread that waits for the interpreter lock gets it
        threads = list(Path("/proc/self/task").iterdir())
        if time.monotonic() > deadline or not any(map(_is_busy, threads)):
            return


def await_threads_before_destroy(distributed: ModuleType) -> None:
    """Make `torch.distributed.destroy_process_group` wait for gloo's threads; `distributed`: that module.

    After it a DistributedDataParallel may hold the last reference to the group, which is freed with the program's
    variables. A Python that was started for one rank is safe by chance: torch.optim imports torch._dynamo while there
    is a group, and so keeps the group. It is not safe if torch._dynamo was imported before.
    """
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def await_and_destroy(*args: Any, **kwargs: Any) -> None:
        await_gloo_threads()
        destroy(*args, **kwargs)

    for module in (distributed, distributed.distributed_c10d):
        vars(module)["destroy_process_group"] = await_and_destroy


def _is_busy(thread: Path) -> bool:
    try:
        name, _, rest = (thread / "stat").read_text(errors="replace").rpartition(")")
    except OSError:  # it has ended
        return False
    return "gloo" in name and rest.split()[0] in ("R", "D")
