"""What there is to show on a GPU: rates eager and compiled, the recipes in jobs/, and airbench94_muon.py unchanged."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer_peers_setup import Peers
from trainer_rounds import ROOT, Contender, Turn, UnavailableError, play, say, write_result
from trainer_runs import LocalPlace

PLAN = """\
gpu: there is no GPU here; with one (and --data-dir, CIFAR-10) this would measure, on GPU 0:
  ResNet-18, batch 512, bf16: images/s, compile: never and compile: always, 5 rounds in turns
  jobs/trainer/modelarts_ours.yaml, 100 epochs: train seconds (published: 60 min on one card, 20 min on 16)
  jobs/trainer/cifar10_resnet18.yaml, 5 seeds: accuracy, seconds to 94 %
  jobs/trainer/cifar10_fastnet.yaml, 5 seeds, in turns with airbench94_muon.py, unchanged, on the same images"""
_EVAL_ROW = re.compile(r"\|\s*\|\s*eval\s*\|.*\|")


def measure_gpu(arguments: argparse.Namespace) -> None:
    """Measure all of PLAN, or say what it is."""
    import torch

    if not torch.cuda.is_available():
        say(PLAN)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        place = LocalPlace(path=Path(directory))
        warm, steps = (20, 40) if arguments.quick else (200, 1000)
        rates = [
            Contender(name=name, label=f"ResNet-18, {name}", take_turn=partial(_rate, place, warm, steps, compile=key))
            for name, key in (("eager", "never"), ("compiled", "always"))
        ]
        played = play(rates, arguments.rounds or 5)
        write_result(arguments.results, "gpu-rates", played, gpu=torch.cuda.get_device_name(0), batch=512)
        if arguments.data_dir is None:
            say("gpu: recipes SKIPPED: --data-dir says where CIFAR-10 is")
            return
        played = play(_recipes(place, arguments), arguments.rounds or 5)
        write_result(arguments.results, "gpu-recipes", played, gpu=torch.cuda.get_device_name(0))


def _rate(place: LocalPlace, warm: int, steps: int, **train: str) -> Turn:
    settings: dict[str, Any] = {"model": "resnet18", "dataset": "random", "samples": 50_000, "epochs": 1000}
    settings |= {
        "batch_size": 512,
        "eval_every": 1000,
        "checkpoint_every": 1000,
        "checkpoint_minutes": 0,
        "log_every": warm,
        "max_steps": warm + steps,
    }
    return place.turn(ranks=1, threads=8, device="gpu", warm_steps=warm, **settings, **train)


def _recipes(place: LocalPlace, arguments: argparse.Namespace) -> list[Contender]:
    data = f"train.data_dir={arguments.data_dir.resolve()}"
    clone = Peers(path=arguments.peers).clone(arguments.airbench, "cifar10-airbench")

    def recipe(name: str) -> Callable[[], Turn]:
        seeds = iter(range(1000))
        return lambda: place.job_turn(ROOT / "jobs/trainer" / f"{name}.yaml", data, f"train.seed={next(seeds)}")

    names = ("modelarts_ours", "cifar10_resnet18", "cifar10_fastnet")
    ours = [Contender(name=name, label=f"jobs/trainer/{name}.yaml", take_turn=recipe(name)) for name in names]
    peer = partial(airbench, clone / "airbench94_muon.py", arguments.data_dir)
    return [*ours, Contender(name="airbench94_muon", label="airbench94_muon.py, unchanged", take_turn=peer)]


def airbench(script: Path, data_dir: Path) -> Turn:
    """Run the file as it is (200 trainings after a warm-up) in a directory with our images in the form it reads."""
    import torch

    from clusterddp.spec.train import TrainSpec
    from clusterddp.train.data.dataset import load_dataset

    if not script.exists():
        raise UnavailableError("cifar10-airbench could not be cloned; --airbench PATH takes another place")
    whole = load_dataset(TrainSpec(dataset="cifar10", data_dir=str(data_dir), download=False))
    with tempfile.TemporaryDirectory(prefix="airbench-") as directory:
        folder = Path(directory, "cifar10")
        folder.mkdir()
        for name, images, labels in (
            ("train", whole.train_images, whole.train_labels),
            ("test", whole.test_images, whole.test_labels),
        ):
            content = {"images": images.permute(0, 2, 3, 1).contiguous(), "labels": labels, "classes": list(range(10))}
            torch.save(content, folder / f"{name}.pt")
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return read_airbench(done.stdout, done.stderr)


def read_airbench(output: str, errors: str) -> Turn:
    """Average its trainings: a row of epoch `eval` ends with TTA accuracy and seconds; the first is the warm-up's."""
    rows = [line.split("|")[1:-1] for line in output.splitlines() if _EVAL_ROW.match(line.strip())]
    trials = [[cell.strip() for cell in row] for row in rows[1:]]
    if not trials:
        raise UnavailableError(f"airbench94_muon.py failed: {(errors.strip().splitlines() or ['no word'])[-1]}")
    accuracies, seconds = [float(row[-2]) for row in trials], [float(row[-1]) for row in trials]
    facts = {
        "accuracy_tta": sum(accuracies) / len(trials),
        "train_seconds": sum(seconds) / len(trials),
        "trials": len(trials),
    }
    return Turn(images_per_s=None, step_ms=None, steps=0, facts=facts)
