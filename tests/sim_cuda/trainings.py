"""The trainings whose effect on a GPU is counted, each in a process that has `sim_cuda.device` instead of CUDA.

    python -m tests.sim_cuda.trainings DIRECTORY alone    every case of a single rank
    python -m tests.sim_cuda.trainings DIRECTORY 0|1      one of two ranks, which meet by a file in DIRECTORY

The answers go into a file of DIRECTORY, DIRECTORY/alone.json or DIRECTORY/0.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = {"batch_size": 2, "epochs": 2, "max_steps": 6, "log_every": 2, "compile": "never", "precision": "auto"}
STEPS_PER_EPOCH = 4
# Every value of model, optimizer, precision, accumulate and deterministic meets every value of the others.
ALONE: dict[str, dict[str, Any]] = {
    "fastnet muon bf16": {"model": "fastnet", "optimizer": "muon", "tta": "mirror_translate"},
    "fastnet sgd fp32 deterministic": {"precision": "fp32", "deterministic": True, "ema": 0.9, "cutout": 4},
    "fastnet adam fp32 accumulate": {"optimizer": "adam", "lr": 0.01, "precision": "fp32", "accumulate": 2},
    "fastnet muon fp32 accumulate deterministic": {
        "optimizer": "muon",
        "precision": "fp32",
        "accumulate": 2,
        "deterministic": True,
    },
    "resnet18 sgd bf16 accumulate": {"model": "resnet18", "accumulate": 2, "ema": 0.9, "augment": "flip"},
    "resnet18 adam bf16 deterministic": {"model": "resnet18", "optimizer": "adam", "lr": 0.01, "deterministic": True},
    "resnet18 muon fp32": {"model": "resnet18", "optimizer": "muon", "precision": "fp32"},
}
PAIR: dict[str, dict[str, Any]] = {
    "exact fastnet muon bf16": {"optimizer": "muon"},
    "exact resnet18 sgd bf16 accumulate": {"model": "resnet18", "accumulate": 2},
    "bf16 fastnet adam fp32 deterministic": {
        "comm": "bf16",
        "optimizer": "adam",
        "precision": "fp32",
        "deterministic": True,
    },
    "bf16 resnet18 sgd fp32": {"comm": "bf16", "model": "resnet18", "precision": "fp32"},
    "local:2 fastnet sgd bf16 accumulate": {"comm": "local:2", "accumulate": 2},
    "local:2 fastnet muon fp32": {"comm": "local:2", "optimizer": "muon", "precision": "fp32"},
}
COUNTED: dict[str, dict[str, Any]] = {
    "fastnet muon": {"optimizer": "muon", "width": 1.0},
    "fastnet sgd": {"width": 1.0},
    "resnet18 sgd": {"model": "resnet18"},
}
PAIR_COUNTED: dict[str, dict[str, Any]] = {
    f"fastnet sgd, 2 ranks, {comm}": {"comm": comm, "width": 1.0} for comm in ("exact", "bf16", "local:2")
}
PHASES = ("augment", "forward, backward, exchange", "optimizer", "averages")


def run_alone(directory: Path) -> dict[str, Any]:
    """Run the cases of a single rank in a process of their own; return its answers."""
    return _run(directory, ["alone"])[0]


def run_pair(directory: Path) -> list[dict[str, Any]]:
    """Run the cases of two ranks; return the answers of both."""
    return _run(directory, ["0", "1"])


def table(answers: dict[str, Any]) -> str:
    """Count what a step launches, and how often the host waits for the GPU."""
    columns = [*PHASES, "all launches", "collectives"]
    waits = ["a step", "a report", "an evaluation", "a checkpoint"]
    rows = [["a step, eager", *columns, *(f"waits of {what}" for what in waits)]]
    for name, found in answers.items():
        rows.append([name, *(str(found[column]) for column in (*columns, *waits))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(lines) + "\n"


def _run(directory: Path, ranks: list[str]) -> list[dict[str, Any]]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.sim_cuda.trainings", str(directory)]
    here = Path(__file__).parents[2]
    started = [subprocess.Popen([*command, rank], cwd=here, env=environ, stdout=subprocess.DEVNULL) for rank in ranks]
    try:
        ends = [process.wait(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(ends), f"sim_cuda.trainings {directory}: exit codes {ends}; the error is above"
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in ranks]


def _main(directory: Path, which: str) -> None:
    from tests.sim_cuda import device  # before anything that imports torch

    device.install(gpus=2)
    from clusterddp.train.device import RankVariables
    from clusterddp.train.group import join_group, leave_group

    is_alone = which == "alone"
    rank = 0 if is_alone else int(which)
    meeting = f"file://{directory}/meeting"
    world_size = 1 if is_alone else 2
    variables = RankVariables(
        rank=rank, local_rank=rank, world_size=world_size, backend="nccl", device="cuda", init_method=meeting
    )
    group = join_group(variables)
    answers: dict[str, Any] = {"cases": {}, "counted": {}}
    for name, options in (ALONE if is_alone else PAIR).items():
        answers["cases"][name] = _train_case(group, directory / f"{which} {name}", options)
    for name, options in (COUNTED if is_alone else PAIR_COUNTED).items():
        answers["counted"][name] = _count_steps(group, directory / f"{which} {name}", options)
    if not is_alone:
        answers["one cannot compile"] = _train_where_one_cannot_compile(group, directory / f"{which} uncompiled")
    answers["contexts"] = sorted(device.contexts)
    leave_group(group)
    if not is_alone:
        by_gloo = join_group(dataclasses.replace(variables, backend="gloo", init_method=f"{meeting}-gloo"))
        answers["gloo"] = _train(by_gloo, directory / f"{which} gloo", [None], {})
        leave_group(by_gloo)
    (directory / f"{which}.json").write_text(json.dumps(answers))


def _train_case(group: Any, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train without a stop, with one in the middle of the first epoch, and, where it can be compared, on the CPU."""
    import torch

    waits: list[str] = []
    whole = _train(group, path.with_name(f"{path.name} whole"), [None], options, waits)
    cut = _train(group, path.with_name(f"{path.name} cut"), [2, None], options)
    answer = {"whole": whole, "cut": cut, "on the CPU": None, "waits of the last step": waits}
    is_comparable = options.get("precision") == "fp32" and options.get("optimizer") != "muon"
    if group.world_size == 1 and is_comparable:
        on_cpu = dataclasses.replace(group, device=torch.device("cpu"))
        answer["on the CPU"] = _train(on_cpu, path.with_name(f"{path.name} cpu"), [None], options)
    torch.use_deterministic_algorithms(False)
    return answer


def _train_where_one_cannot_compile(group: Any, path: Path) -> dict[str, Any]:
    """Train with compile auto, which fails on rank 1, and without; return both, and what rank 0 said."""
    import torch

    class Uncompilable(torch.nn.Module):
        """Fails when the forward pass, and with it batch norm, is done, as a backward pass that does not compile."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.module(images)
            raise RuntimeError("Failed to find C compiler.\nWhere is it?")

    compiled, torch.compile = torch.compile, lambda module: Uncompilable(module) if group.rank else module  # type: ignore[assignment]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        auto = _train(group, path.with_name(f"{path.name} auto"), [None], {"compile": "auto"})
    torch.compile = compiled
    never = _train(group, path.with_name(f"{path.name} never"), [None], {})
    return {"auto": auto, "never": never, "said": said.getvalue()}


def _train(
    group: Any, path: Path, stops: list[int | None], options: dict[str, Any], waits: list[str] | None = None
) -> dict[str, Any]:
    """Train once for each of `stops`; `waits` is for what the last step, which no report precedes, waits for."""
    from clusterddp.train.loop import train
    from tests.sim_cuda.device import counts
    from tests.support.train_gang import outcome

    snapshots = [counts.copy()]
    for attempt, stop_after in enumerate(stops):
        setting = _settle(group, path, attempt=attempt, stop_after=stop_after, options=options)
        state = train(setting, after_step=lambda: snapshots.append(counts.copy()))
        setting.reporter.close()
    if waits is not None:
        waits += snapshots[-1].since(snapshots[-2]).waits
    return outcome(state) | {"finished": state.finished(setting.schedule), "device": setting.group.device.type}


def _settle(
    group: Any,
    path: Path,
    *,
    attempt: int = 0,
    stop_after: int | None = None,
    options: dict[str, Any],
) -> Any:
    from clusterddp.train.main import set_up_torch
    from tests.support.train_gang import settle

    (path / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
    options = TINY | options
    if options.get("model") == "resnet18":
        options["max_steps"] = STEPS_PER_EPOCH
    samples = STEPS_PER_EPOCH * group.world_size * options["batch_size"] * options.get("accumulate", 1)
    setting = settle(group, path, attempt=attempt, stop_after=stop_after, samples=samples, **options)
    set_up_torch(setting.spec, threads="1")
    return setting


def _count_steps(group: Any, path: Path, options: dict[str, Any]) -> dict[str, int]:
    """Count what a step, a report, an evaluation and a checkpoint do to the GPU."""
    from clusterddp.train.begin import begin
    from clusterddp.train.loop import evaluate_if_due, save, train_epoch
    from tests.sim_cuda.device import counts

    setting = _settle(group, path, options=options)
    state = begin(setting)
    events: list[tuple[str, int]] = []
    record = state.meter.clock.record

    def count_and_record(event: Any) -> None:
        events.append((event, counts.launches.total()))
        record(event)

    state.meter.clock.record = count_and_record  # type: ignore[method-assign]
    snapshots = []
    train_epoch(state, setting, lambda: snapshots.append(counts.copy()))
    _, second, third, fourth = snapshots  # DistributedDataParallel arranges its buckets in the second step
    with_report, step = third.since(second), fourth.since(third)
    begins = [number for number, (event, _) in enumerate(events) if event == "step"]
    names, done = zip(*events[begins[3] : begins[4]], strict=True)
    waits = ("wait_begin", "wait_end")
    assert names == ("step", "load_begin", "load_end", *waits, *waits, "step_end")
    launches = (done[2] - done[1], done[4] - done[2], done[5] - done[4], done[7] - done[5])
    found = {
        **dict(zip(PHASES, launches, strict=True)),
        "all launches": step.launches.total(),
        "collectives": step.collectives.total(),
        "a step": step.waits.total(),
        "a report": with_report.waits.total() - step.waits.total(),
        "an evaluation": _waits_of(lambda: evaluate_if_due(state, setting)),
        "a checkpoint": _waits_of(lambda: save(state, setting)),
    }
    setting.writer.wait()
    setting.agreement.settle()
    setting.reporter.close()
    return found


def _waits_of(action: Callable[[], Any]) -> int:
    from tests.sim_cuda.device import counts

    before = counts.copy()
    action()
    return counts.since(before).waits.total()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
