"""Contenders in turns: A, B, C, then C, B, A, and so on; what each turn gave, on what machine, as one JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "avx512_bf16", "amx_bf16": "AMX"}


class UnavailableError(Exception):
    """Why a contender cannot take part here."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn of one contender gave."""

    images_per_s: float | None
    """Over all its ranks and all its timed steps; None where a turn is not about speed."""
    step_ms: float | None
    steps: int
    """Timed steps: those of the warm-up are not among them."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known: precision, comm, loss, ..."""
    load: float = 0.0
    """Load average of the last minute when the turn began: what was already waiting for the cores."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of a table."""

    name: str
    label: str
    take_turn: Callable[[], Turn]


def play(contenders: Sequence[Contender], rounds: int) -> dict[str, Any]:
    """Let every contender take one turn per round, in an order that turns around; return rows and who was left out."""
    turns: dict[str, list[Turn]] = {each.name: [] for each in contenders}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        for each in contenders if number % 2 == 0 else list(reversed(contenders)):
            if each.name in skipped:
                continue
            load, began = os.getloadavg()[0], time.monotonic()
            try:
                turn = each.take_turn()
            except UnavailableError as error:
                skipped[each.name] = str(error)
                say(f"round {number + 1}  {each.name:26} SKIPPED: {error}")
                continue
            turns[each.name].append(Turn(**{**asdict(turn), "load": load}))
            say(f"round {number + 1}  {each.name:26} {spell(turn)}  (turn {time.monotonic() - began:.0f} s)")
    rows = [
        {"name": each.name, "label": each.label, "turns": [asdict(turn) for turn in turns[each.name]]}
        for each in contenders
        if turns[each.name]
    ]
    return {"rows": rows, "skipped": {each.label: skipped[each.name] for each in contenders if each.name in skipped}}


def say(text: str) -> None:
    print(text, flush=True)


def spell(turn: Turn) -> str:
    speed = "" if turn.images_per_s is None else f"{turn.images_per_s:8.1f} img/s {turn.step_ms:8.1f} ms/step"
    facts = {key: turn.facts[key] for key in ("precision", "comm", "loss", "train_loss") if key in turn.facts}
    return speed + "".join(f"  {key} {_short(value)}" for key, value in facts.items())


def ratios(over: Mapping[str, Any], under: Mapping[str, Any], *, key: str = "images_per_s") -> list[float]:
    """Divide the figures of two rows round by round; a turn's value may also be one of its facts."""
    pairs = zip(_figures(over, key), _figures(under, key), strict=False)
    return [mine / other for mine, other in pairs]


def _figures(row: Mapping[str, Any], key: str) -> Iterator[float]:
    for turn in row["turns"]:
        yield turn[key] if key in turn else turn["facts"][key]


def median_and_spread(values: Sequence[float], form: str = ".2f") -> str:
    """Spell a median with its spread: `1.72 (1.66 to 1.80)`; one value stands alone."""
    middle = format(statistics.median(values), form)
    return f"{middle} ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else middle


def write_result(results: Path, part: str, played: Mapping[str, Any], **settings: Any) -> Path:
    """Write what a part measured, with the facts of the machine, to `results/PART.json`."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{part}.json"
    whole = {"part": part, "machine": describe_machine(), "settings": settings, **played}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    say(f"{part}: written to {path}")
    return path


def describe_machine() -> dict[str, Any]:
    """Write what a figure depends on, and nothing that names the machine."""
    processor, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            processor = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
            break
    return {
        "processor": processor,
        "features": [name for flag, name in _FEATURES.items() if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
