"""Everything that clusterddp has never done on your GPUs, in one run: one JSON file and one page to send.

    make gpu-check [DATA=DIR]                 or: python benchmarks/gpu_check.py [--data-dir DIR] [--cpu] [--out PATH]

First it says what is missing: a GPU, a driver, a torch with CUDA, a compiler. Where nothing is, it measures what ranks
on all GPUs of this machine can do (`clusterddp doctor --deep`), runs the tests that need a GPU, and 200 steps of
the jobs in jobs/, in turns with airbench94_muon.py and Lightning. DIR has CIFAR-10; without it the jobs see noise, and
airbench is left out. 15 minutes on one card; the peers are cloned and installed at the first use. --cpu does all that
on the CPU, to see that it works. How to send the files: CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import platformdirs
from trainer_gpu import airbench
from trainer_peers_setup import Peers
from trainer_rounds import ROOT, Contender, describe_machine, play, say
from trainer_runs import LocalPlace

from clusterddp.facts.checks import Check, Needs, Result, is_healthy, red, to_json
from clusterddp.facts.judge import judge_machine
from clusterddp.facts.machine import Machine, read_machine
from clusterddp.facts.torch import import_torch

_STEPS, _WARM_STEPS, _STEPS_ON_CPU = 200, 50, 4
_FIGURES = ("images_per_s", "step_ms", "compile_seconds", "train_seconds", "accuracy_tta")
_JOBS = ("trainer/cifar10_resnet18", "trainer/cifar10_fastnet", "trainer/modelarts_ours", "resnet18_2x8")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
.red { color: #b00020; font-weight: 600; } .note { color: #9a6700; } .ok { color: #1a7f37; }
pre { background: #f6f8fa; overflow-x: auto; padding: .8rem; }
@media (prefers-color-scheme: dark) {
  body { background: #111; color: #ddd; } td, th { border-color: #333; } pre { background: #1b1b1b; }
  .red { color: #ff7b72; } .note { color: #d29922; } .ok { color: #3fb950; }
}
"""


def main() -> int:
    """Check, measure, write; exit code 3 where something is missing, 1 where something failed."""
    arguments = parse()
    machine = dataclasses.replace(read_machine(ROOT, os.environ), torch=import_torch())
    needs = Needs(trainer=True, use_gpus=not arguments.cpu)
    found = [*judge_machine(machine, needs), *([] if arguments.cpu else find_missing(machine))]
    checks = [Check(name=name, results={"here": result}) for name, result in found]
    report: dict[str, Any] = {"schema": 1, "kind": "gpu-check", "machine": describe_machine()}
    report["checks"] = [each for each in to_json(checks) if each["check"] != "runs directory"]
    for each in report["checks"]:
        say(
            f"{each['level']:5} {each['check']:16} {each['found']}"
            + (f"\n      fix: {each['fix']}" if each["fix"] else "")
        )
    if not is_healthy(checks):
        write(report, arguments.out)
        say("nothing was measured: what is red above has to be mended first")
        return 3
    gpus = len(machine.gpus)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        place = LocalPlace(path=Path(directory))
        report["deep"] = measure_deep(place.path, gpus, cpu=arguments.cpu)
        write(report, arguments.out)
        report["tests"] = run_tests(place.path)
        write(report, arguments.out)
        played = play(list(contenders(arguments, place, gpus)), arguments.rounds)
        report |= {"speed": [summarise(row) for row in played["rows"]], "left_out": played["skipped"]}
    write(report, arguments.out)
    worked = report["deep"].get("healthy") and not report["tests"]["failed"] and report["speed"]
    return 0 if worked else 1


def find_missing(machine: Machine) -> Iterator[tuple[str, Result]]:
    """Say what a GPU needs that is not here."""
    if not machine.gpus:
        where = "nvidia-smi lists none" if shutil.which("nvidia-smi") else "there is no nvidia-smi"
        yield "NVIDIA GPU", red(f"none: {where}", "NVIDIA's driver; nvidia-smi -L has to list the GPUs")
    if machine.torch is not None and machine.torch.version and not machine.torch.cuda:
        fix = "install torch with CUDA: https://pytorch.org/get-started/locally"
        yield "torch with CUDA", red(f"{machine.torch.version} is for the CPU", fix)


def measure_deep(directory: Path, gpus: int, *, cpu: bool) -> dict[str, Any]:
    """Return what `doctor --deep` finds with one rank on each GPU."""
    resources = {"procs_per_node": 2} if cpu else {"gpus_per_node": gpus}
    train: dict[str, Any] = {"model": "resnet18", "batch_size": 128}
    if cpu:
        train = {"model": "fastnet", "width": 0.25, "batch_size": 8, "precision": "fp32", "compile": "never"}
    spec = {"name": "gpu-check", "launcher": "local", "device": "cpu" if cpu else "gpu", "resources": resources}
    (directory / "deep.yaml").write_text(json.dumps(spec | {"train": train}))  # JSON is YAML
    say("deep check: ranks on all GPUs measure, and hang")
    command = [sys.executable, "-m", "clusterddp", "doctor", "deep.yaml", "--deep", "-o", "json"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=environ, text=True, capture_output=True, check=False)
    if not done.stdout:
        return {"healthy": False, "error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    return without_host_names(json.loads(done.stdout))


def without_host_names(deep: dict[str, Any]) -> dict[str, Any]:
    """Put numbers in place of the names of hosts."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(each["host"] for each in deep["findings"]))}
    return deep | {
        key: [each | {"host": numbers.get(each["host"], each["host"])} for each in deep[key]]
        for key in ("checks", "findings")
    }


def run_tests(directory: Path) -> dict[str, Any]:
    """Run the tests that need a GPU; return how many passed, and which did not."""
    say("the tests that need a GPU")
    results = directory / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={results}", str(ROOT / "tests")]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []  # noqa: S314
    by_outcome: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    for case in cases:
        outcome = next((each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed")
        by_outcome[{"failure": "failed", "error": "failed"}.get(outcome, outcome)].append(str(case.get("name")))
    return {"passed": len(by_outcome["passed"]), "failed": by_outcome["failed"], "skipped": by_outcome["skipped"]}


def contenders(arguments: argparse.Namespace, place: LocalPlace, gpus: int) -> Iterator[Contender]:
    """Yield the shipped jobs, each for some steps on the GPUs that are here, and the peers."""
    steps, warm = (_STEPS_ON_CPU, 1) if arguments.cpu else (_STEPS, _WARM_STEPS)
    data = ["train.dataset=random", "train.data_dir=null"]
    if arguments.data_dir is not None:
        data = [f"train.data_dir={arguments.data_dir.resolve()}"]
    ends = [f"train.max_steps={steps + warm}", f"train.log_every={warm}"]
    ends += ["train.checkpoint_every=1000", "train.checkpoint_minutes=0"]
    for name in _JOBS:
        here = ["launcher=local", "resources.nodes=1", "resources.time=null"]
        here += ["resources.gpus_per_node=null", "device=cpu"] if arguments.cpu else []
        here += [f"resources.gpus_per_node={min(gpus, 8)}"] if name.endswith("2x8") and not arguments.cpu else []
        take = partial(place.job_turn, ROOT / "jobs" / f"{name}.yaml", *here, *data, *ends, warm_steps=warm)
        yield Contender(name=Path(name).name, label=f"jobs/{name}.yaml", take_turn=take)
    if arguments.no_peers:
        return
    try:
        peers = Peers.set_up(arguments.peers, kuangliu=Peers.KUANGLIU)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"peers: SKIPPED: {error}")
        return
    lightning = partial(
        peers.turn,
        "lightning",
        ranks=1,
        threads=8,
        steps=(warm, steps),
        best=True,
        batch=8 if arguments.cpu else 512,
        device="cpu" if arguments.cpu else "gpu",
    )
    yield Contender(name="lightning", label="Lightning, ResNet-18, 512 images", take_turn=lightning)
    if arguments.data_dir is not None and not arguments.cpu:
        clone = peers.clone(arguments.airbench, "cifar10-airbench")
        take = partial(airbench, clone / "airbench94_muon.py", arguments.data_dir)
        yield Contender(name="airbench94_muon", label="airbench94_muon.py, unchanged", take_turn=take)


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of a row's turns."""
    facts = [turn["facts"] | {key: turn[key] for key in ("images_per_s", "step_ms")} for turn in row["turns"]]
    values = {key: [each[key] for each in facts if each.get(key) is not None] for key in _FIGURES}
    medians = {key: round(statistics.median(numbers), 2) for key, numbers in values.items() if numbers}
    return {"what": row["label"], "turns": len(facts), "precision": facts[0].get("precision"), **medians}


def write(report: dict[str, Any], out: Path) -> None:
    """Write the report as JSON and as a page, as far as it is."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_name(f"{out.name}.html").write_text(render_page(report, title="clusterddp: make gpu-check"))
    say(f"written: {out}.json and {out}.html")


def render_page(report: Mapping[str, Any], *, title: str) -> str:
    """Lay out a report as one HTML file without references to others.

    `checks` become a table, of the `findings` those of the first rank are shown, and every other value as it is.
    """
    parts = [f"<h1>{_text(title)}</h1>", *_section(report)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _section(report: Mapping[str, Any]) -> Iterable[str]:
    plain = {key: value for key, value in report.items() if not _is_large(value)}
    if plain:
        yield _table(["", ""], plain.items())
    if report.get("checks"):
        rows = [
            (each["level"], each["check"], each["host"], each["found"], each["fix"] if each["level"] != "ok" else "")
            for each in report["checks"]
        ]
        yield _table(["", "check", "where", "found", "fix"], rows, marked=True)
    for each in report.get("findings", ()):
        if each["rank"] == 0 or (each["found"] or {}).get("topology"):
            yield from _finding(each)
    for key, value in report.items():
        if _is_large(value) and key not in ("checks", "findings"):
            yield f"<h2>{_text(key)}</h2>"
            yield from _value(value)


def _finding(finding: Mapping[str, Any]) -> Iterable[str]:
    yield f"<h2>{_text(finding['probe'])}, rank {_text(finding['rank'])} on host {_text(finding['host'])}</h2>"
    if finding["found"] is None:
        yield f'<p class="red">{_text(finding["error"])}</p>'
    else:
        yield from _value(finding["found"])


def _value(value: Any) -> Iterable[str]:
    """Lay out objects as a section, lists of objects as a table, text of several lines as it is."""
    if isinstance(value, dict):
        yield from _section(value)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        names = list(dict.fromkeys(name for each in value for name in each))
        yield _table(names, [[each.get(name, "") for name in names] for each in value])
    elif isinstance(value, list) and all(isinstance(each, list) for each in value):
        yield _table([], value)
    else:
        yield f"<pre>{_text(value)}</pre>"


def _is_large(value: Any) -> bool:
    return bool(value) and (isinstance(value, dict | list) or (isinstance(value, str) and "\n" in value))


def _table(heading: Iterable[str], rows: Iterable[Iterable[Any]], *, marked: bool = False) -> str:
    """Lay out rows; `marked`: the first cell is the level of its row."""
    lines = []
    for row in rows:
        cells = [_text("" if cell is None else cell) for cell in row]
        first = f' class="{cells[0]}"' if marked else ""
        lines.append(
            "<tr>" + "".join(f"<td{first if n == 0 else ''}>{cell}</td>" for n, cell in enumerate(cells)) + "</tr>"
        )
    names = list(heading)
    head = "<tr>" + "".join(f"<th>{_text(name)}</th>" for name in names) + "</tr>\n" if any(names) else ""
    return f"<table>\n{head}" + "\n".join(lines) + "\n</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(platformdirs.user_cache_dir("clusterddp-benchmarks"))
    name = f"gpu-{time.strftime('%Y-%m-%d', time.gmtime())}"
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 is")
    parser.add_argument("--cpu", action="store_true", help="a few steps on the CPU: to see that it works")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each job and peer")
    parser.add_argument("--no-peers", action="store_true", help="our own jobs only")
    parser.add_argument("--peers", type=Path, default=cache / "peers", help="where the peers are or will be")
    parser.add_argument("--airbench", default=Peers.AIRBENCH, help="what git shall clone; a path works, too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / name, help="without its ending")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
