"""docs/benchmarks.md from the results: each part's table stands between two marks, the words around them stay."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_rounds import ROOT, median_and_spread, ratios, say

Result = Mapping[str, Any]


def write_tables(results: Path, docs: Path) -> None:
    """Replace every block of `docs` for which there is a result; the others stay as they are."""
    text = docs.read_text()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    blocks = {part: "\n".join(_whole(found[part], rows)) for part, rows in PARTS.items() if part in found}
    curves = [line for part, result in found.items() if part.startswith("curve-") for line in _curve(result)]
    blocks |= {"curves": "\n".join(curves)} if curves else {}
    checked = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    checked = [each for each in checked if each.get("kind") == "gpu-check" and "speed" in each]
    if checked:
        blocks["gpu-check"] = "\n\n".join("\n".join(gpu_check_rows(each)) for each in checked)
    blocks["bars"] = "\n".join(_bars(found, _split(text, "bars")[1]))
    for part, block in blocks.items():
        before, _, after = _split(text, part)
        text = f"{before}\n{block}\n{after}"
    docs.write_text(text)
    say(f"table: {', '.join(blocks)} written to {docs}")


def _split(text: str, part: str) -> tuple[str, str, str]:
    """Cut the text at the marks of a part: what is before it, the part, what is behind it."""
    begin, end = f"<!-- {part} -->", f"<!-- /{part} -->"
    before, found_begin, rest = text.partition(begin)
    block, found_end, after = rest.partition(end)
    assert found_begin, f"there is no {begin}"
    assert found_end, f"there is no {end}"
    return before + begin, block, end + after


def _whole(result: Result, rows: Callable[[Result], Iterator[str]]) -> Iterator[str]:
    yield _machine(result)
    yield ""
    yield from rows(result)
    for label, why in result["skipped"].items():
        yield f"\nNot measured: {label} ({why})."


def _machine(result: Result) -> str:
    machine = result["machine"]
    loads = [turn["load"] for row in result.get("rows", ()) for turn in row["turns"]]
    rounds = max((len(row["turns"]) for row in result.get("rows", ())), default=0)
    features = f" ({', '.join(machine['features'])})" if machine["features"] else ""
    cores = f"{machine['cores']} cores of {machine['processor']}{features}"
    peers = "".join(f", {name} {number}" for name, number in result["settings"].get("peers", {}).items())
    load = f", load average when turns began {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    times = f"n = {rounds} rounds{load}; " if loads else ""
    return (
        f"{result['settings'].get('gpu') or cores}, {machine['memory_gb']} GB, Python {machine['python']}, "
        f"torch {machine['torch']}{peers}; {times}{machine['date']}, commit {machine['commit']}."
    )


def _cpu(result: Result) -> Iterator[str]:
    rows = _by_name(result)
    yield "| contender | images/s | precision | clusterddp is ... times as fast |"
    yield "|---|---|---|---|"
    for name, row in rows.items():
        mine = rows.get("ours-2" if name.endswith("-2") else "ours")
        times = "" if mine is None or name in ("ours", "ours-2") else median_and_spread(ratios(mine, row))
        yield f"| {row['label']} | {_speed(row)} | {_fact(row, 'precision')} | {times} |"


def _ranks(result: Result) -> Iterator[str]:
    rows = _by_name(result)
    yield "| ranks | images/s | against one process with all cores |"
    yield "|---|---|---|"
    for row in rows.values():
        yield f"| {row['label']} | {_speed(row)} | {median_and_spread(ratios(row, rows['threads']))} |"


def _link(result: Result) -> Iterator[str]:
    rows = _by_name(result)
    yield "| exchange | images/s | ms/step | MB sent per step and rank | against one machine | against comm: exact |"
    yield "|---|---|---|---|---|---|"
    for row in rows.values():
        sent = _fact(row, "comm_bytes_per_step")
        against = [median_and_spread(ratios(row, rows[other])) if other in rows else "" for other in ("one", "exact")]
        step = statistics.median(turn["step_ms"] for turn in row["turns"])
        cells = [str(row["label"]), _speed(row), f"{step:.0f}", f"{float(sent) / 1e6:.2f}" if sent else "", *against]
        yield f"| {' | '.join(cells)} |"


def _loss(result: Result) -> Iterator[str]:
    rows = _by_name(result)
    yield "| exchange | training loss, last fifth of the steps | of exact's | test loss | of exact's | test accuracy |"
    yield "|---|---|---|---|---|---|"
    for row in rows.values():
        cells = [row["label"]]
        for key in ("train_loss", "loss"):
            against = ratios(row, rows["exact"], key=key) if "exact" in rows else []
            cells += [_facts(row, key, ".3f"), median_and_spread(against, ".3f") if against else ""]
        yield f"| {' | '.join([*cells, _facts(row, 'accuracy', '.1%')])} |"


def _gpu_rates(result: Result) -> Iterator[str]:
    yield "| | images/s |"
    yield "|---|---|"
    for row in result["rows"]:
        yield f"| {row['label']} | {_speed(row)} |"


def _gpu_recipes(result: Result) -> Iterator[str]:
    yield "| recipe | accuracy | accuracy with TTA | train seconds | compile seconds |"
    yield "|---|---|---|---|---|"
    for row in result["rows"]:
        accuracies = [_facts(row, key, ".2%") for key in ("accuracy", "accuracy_tta")]
        seconds = [_facts(row, key, ".1f") for key in ("train_seconds", "compile_seconds")]
        yield f"| {' | '.join([row['label'], *accuracies, *seconds])} |"


def gpu_check_rows(report: Result) -> Iterator[str]:
    """Lay out what `make gpu-check` found on a user's GPUs."""
    deep, machine = report["deep"], report["machine"]
    found = {each["probe"]: each["found"] for each in deep.get("findings", ()) if each["rank"] == 0 and each["found"]}
    environment = found.get("environment", {})
    yield (
        f"{deep.get('ranks')} x {environment.get('gpu')}, driver {environment.get('driver')}, "
        f"torch {machine['torch']}, NCCL {environment.get('nccl')}; {machine['date']}, commit {machine['commit']}. "
        f"Tests on the GPU: {report['tests']['passed']} passed, {len(report['tests']['failed'])} failed."
    )
    yield ""
    yield "| check | found |"
    yield "|---|---|"
    for each in deep.get("checks", ()):
        yield f"| {each['check']} | {each['found']} |"
    yield ""
    yield "| what | images/s | ms/step | compile, s |"
    yield "|---|---|---|---|"
    for row in report["speed"]:
        cells = [str(row.get(key, "")) for key in ("images_per_s", "step_ms", "compile_seconds")]
        yield f"| {' | '.join([row['what'], *cells])} |"


def _curve(result: Result) -> Iterator[str]:
    spec, epochs = result["spec"], result["epochs"]
    best, total = max(row["accuracy"] for row in epochs), epochs[-1]["minutes"]
    yield f"### {spec['name']}"
    yield ""
    yield _machine(result)
    yield f"Accuracy {epochs[-1]['accuracy']:.2%} after {total:.1f} minutes (best {best:.2%}); n = 1."
    yield ""
    yield "| epoch | minutes | test accuracy | test loss |"
    yield "|---|---|---|---|"
    keep = max(1, len(epochs) // 12)
    for row in epochs:
        if row["epoch"] % keep == 0 or row is epochs[-1]:
            yield f"| {row['epoch']} | {row['minutes']:.1f} | {row['accuracy']:.2%} | {row['loss']:.3f} |"
    yield ""


BARS = (
    ("CPU: against the kuangliu loop", "cpu", "ours", "kuangliu", 3.0),
    ("CPU: against Lightning's defaults", "cpu", "ours", "lightning", 1.8),
    ("CPU: against Accelerate's defaults", "cpu", "ours", "accelerate", 1.8),
    ("CPU: against Lightning's best flags", "cpu", "ours", "lightning-best", 1.0),
    ("CPU: against Accelerate's best flags", "cpu", "ours", "accelerate-best", 1.0),
    ("2 ranks against one process with all threads", "ranks", "2", "threads", 1.05),
    ("1 Gbit/s: exact against one machine (is slower)", "link-1000", "one", "exact", 1.0),
    ("1 Gbit/s: bf16 against one machine", "link-1000", "bf16", "one", 1.1),
    ("1 Gbit/s: local:8 against one machine", "link-1000", "local:8", "one", 1.6),
    ("1 Gbit/s: local:8 against exact", "link-1000", "local:8", "exact", 2.4),
)
"""What was asked for: the median of the rounds' ratios of two rows of a part, and the least that it shall be."""


def _bars(found: Mapping[str, Result], before: str) -> Iterator[str]:
    """Compare with what was asked for; a row of a part that was not measured now stays as it was."""
    rows_before = {line.split("|")[1].strip(): line for line in before.splitlines() if line.startswith("|")}
    yield "| asked for | at least | measured | |"
    yield "|---|---|---|---|"
    for what, part, over, under, least in BARS:
        rows = _by_name(found[part]) if part in found else {}
        if over in rows and under in rows:
            values = ratios(rows[over], rows[under])
            met = "met" if statistics.median(values) >= least else "missed"
            yield f"| {what} | {least} | {median_and_spread(values)} | {met} |"
        else:
            yield rows_before.get(what, f"| {what} | {least} | not measured | |")


def _by_name(result: Result) -> dict[str, Any]:
    return {row["name"]: row for row in result["rows"]}


def _speed(row: Mapping[str, Any]) -> str:
    return median_and_spread([turn["images_per_s"] for turn in row["turns"]], ".1f")


def _fact(row: Mapping[str, Any], key: str) -> str:
    return str(row["turns"][0]["facts"].get(key, ""))


def _facts(row: Mapping[str, Any], key: str, form: str) -> str:
    values: Sequence[float] = [turn["facts"][key] for turn in row["turns"] if key in turn["facts"]]
    return median_and_spread(values, form) if values else ""


PARTS: dict[str, Callable[[Result], Iterator[str]]] = {
    "cpu": _cpu,
    "ranks": _ranks,
    "link-1000": _link,
    "link-100": _link,
    "loss": _loss,
    "gpu-rates": _gpu_rates,
    "gpu-recipes": _gpu_recipes,
}
