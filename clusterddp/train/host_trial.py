"""One trial of a host before a run: how fast it multiplies matrices, and all-reduces numbers with one other host.

    python -m clusterddp.train.host_trial        started by the agent, once for each host of a pair

Standard input: one line of JSON, the order; for the second host of a pair then a line `{"port": n}`. Standard output:
a line for each answer: `{"port": n}`, `{"compute": ..}`, `{"link": ..}`, `{"error": ..}`. When standard
input ends, this process exits at once.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from clusterddp.train.device import synchronize

_MEASURE_S = 0.3
_MIN_BYTES, _MAX_BYTES = 1 << 20, 1 << 26
_TRANSFER_S = 0.25
"""How long one reduction may take."""
_SIZES = {"cpu": 1024, "cuda": 4096}
_ROUNDS = 3


def main() -> None:
    """Measure what the order asks for, and write the answers."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    order = lines.get()
    try:
        if order["compute"]:
            answer(compute=measure_compute(order["gpus"]))
        if order["pair"]:
            answer(link=measure_link(order["pair"], order["backend"], lines.get, answer))
    except Exception as error:
        answer(error=_describe(error))
    answers.close()
    os._exit(0)  # destroying a broken process group may hang


def measure_compute(gpus: int) -> dict[str, float]:
    """Time a product of two square matrices on the CPU, or on each of the first `gpus` GPUs: device -> ms."""
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    return {str(device): round(_time_product(device), 3) for device in devices}


def measure_link(
    pair: dict[str, Any], backend: str, next_line: Callable[[], dict[str, Any]], answer: Callable[..., None]
) -> dict[str, float]:
    """Reduce numbers with the other host of a pair; returns MB/s and, for a single number, ms."""
    limit = timedelta(seconds=pair["timeout_s"])
    is_first = pair["rank"] == 0
    port = 0 if is_first else next_line()["port"]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        pair["address"], port, 2, is_first, timeout=limit, wait_for_workers=False
    )
    if is_first:
        answer(port=store.port)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=pair["rank"], world_size=2, timeout=limit)
    latency_s = min(_time_reduction(4, device) for _ in range(10))
    num_bytes = _MIN_BYTES
    took_s = _agree(_time_reduction(num_bytes, device), device)
    while took_s < _TRANSFER_S and num_bytes < _MAX_BYTES:
        num_bytes *= 4
        took_s = _agree(_time_reduction(num_bytes, device), device)
    took_s = min([took_s, *(_agree(_time_reduction(num_bytes, device), device) for _ in range(_ROUNDS))])
    return {"mbyte_per_s": round(num_bytes / took_s / 1e6, 1), "latency_ms": round(1000 * latency_s, 3)}


def _time_product(device: torch.device) -> float:
    """Return the median time of a product in ms."""
    size = _SIZES[device.type]
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 2 * _ROUNDS or time.perf_counter() - began < _MEASURE_S:
        before = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        times.append(time.perf_counter() - before)
    return 1000 * statistics.median(times[_ROUNDS:])


def _time_reduction(num_bytes: int, device: torch.device) -> float:
    numbers = torch.ones(num_bytes // 4, device=device)
    before = time.perf_counter()
    dist.all_reduce(numbers)
    synchronize(device)
    return time.perf_counter() - before


def _agree(took_s: float, device: torch.device) -> float:
    """Return the longer one of both hosts' times, so that both continue alike."""
    time_s = torch.tensor(took_s, device=device)
    dist.all_reduce(time_s, op=dist.ReduceOp.MAX)
    return float(time_s)


def _listen(lines: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        lines.put(json.loads(line))
    os._exit(1)


def _describe(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}"


if __name__ == "__main__":
    main()
