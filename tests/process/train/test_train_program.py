"""What the trainer writes and prints, and the trainer as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
import torch

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import INIT_METHOD
from clusterddp.run.directory import RunDir
from clusterddp.run.stop import request_stop
from clusterddp.spec import model
from clusterddp.spec.train import TrainSpec
from clusterddp.train.data.download import default_data_dir
from clusterddp.train.group import Group
from clusterddp.train.optim import plan_schedule
from clusterddp.train.report.reporter import Reporter
from clusterddp.train.state import tensors_sha256
from tests.support.train_gang import TINY, make_run, meeting_place, metrics_rows, one_rank, open_gang, train_once


def test_metrics_rows_have_place_and_speed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, batch_size=32)
    assert [row["step"] for row in metrics_rows(path, "train")] == [3, 6, 9, 12, 15, 18]
    assert set(metrics_rows(path, "train")[0]) == {
        *("kind", "attempt", "epoch", "step", "loss", "accuracy", "lr", "epochs_total", "steps_total", "time"),
        *("images_per_s", "images_per_s_per_rank", "step_ms", "data_wait_percent", "comm_exposed_percent"),
        *("comm_bytes_per_step", "memory_peak_mb"),
        *("precision", "comm", "exact", "train_seconds", "checkpoint_seconds"),
    }
    assert [(row["epoch"], row["step"], row["samples"]) for row in metrics_rows(path, "eval")] == [
        (1, 9, 57),
        (2, 18, 57),
    ]
    assert all(0 <= row["accuracy"] <= 1 for row in metrics_rows(path, "eval"))


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = make_run(tmp_path / "run")
    train_once(one_rank(), path, batch_size=32)
    events = EventAccumulator(str(path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/accuracy")] == [9, 18]
    assert [event.step for event in events.Scalars("train/loss")] == [3, 6, 9, 12, 15, 18]
    assert len(events.Scalars("train/step_ms_p95")) == 6


def heavy_modules(group: Group, path: Path) -> set[str]:
    train_once(group, path)
    return {"tensorboard", "torchvision", "rich"} & set(sys.modules)


def test_only_the_first_rank_loads_tensorboard_and_none_loads_torchvision(tmp_path: Path) -> None:
    with open_gang() as fresh:  # ranks that have loaded nothing else yet
        first, second = fresh.run(2, heavy_modules, make_run(tmp_path / "run"))
    assert second == set()
    assert first <= {"tensorboard"}


# -- the program


def start_program(
    path: Path,
    world_size: int = 1,
    *,
    program: tuple[str, ...] = ("-m", "clusterddp.train.main"),
    **variables: str,
) -> list[subprocess.Popen[str]]:
    environ = os.environ | {INIT_METHOD: meeting_place(path.parent), "GLOO_SOCKET_IFNAME": "lo"} | variables
    environ |= {"CLUSTERDDP_RUN_DIR": str(path), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *program],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CLUSTERDDP_BACKEND": "gloo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def test_the_program_trains_alone_and_writes_its_summary(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", batch_size=32)
    (process,) = start_program(path)
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 0, talk
    summary = json.loads((path / "summary.json").read_text())
    assert summary["eval_samples"] == 57
    assert (summary["epochs"], summary["steps"], summary["samples"]) == (2, 18, 576)
    assert summary["world_size"] == 1
    assert summary["dataset"] == "shapes (generated)"
    assert len(summary["params_sha256"]) == len(summary["buffers_sha256"]) == 64
    assert 0 < summary["start_up_seconds"] < summary["attempt_seconds"]
    assert min(summary["train_seconds"], summary["eval_seconds"], summary["checkpoint_seconds"]) > 0
    assert sorted(summary["step_ms"]) == ["max", "p50", "p95"]
    assert "epoch 1/2 step 3/9 loss " in talk
    assert talk.splitlines()[-1].startswith("done: ")
    assert "fastnet on shapes (generated): 1 rank on cpu, fp32, 18 steps of 32 samples" in talk


AND_LOOK_AROUND = """
import os
from pathlib import Path
from clusterddp.train.main import main
main(os.environ)
print(*{path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")})
"""


def test_no_thread_of_the_group_outlives_it(tmp_path: Path) -> None:
    """One that does may abort a rank that is done, while Python ends."""
    processes = start_program(make_run(tmp_path / "run", epochs=1), 2, program=("-c", AND_LOOK_AROUND))
    talk = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], talk
    assert [[name for name in out.split() if "gloo" in name or "tcpstore" in name] for out, _ in talk] == [[], []]


@pytest.mark.slow
def test_the_program_obeys_the_stop_file_on_both_ranks_and_resumes(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", epochs=300)
    (path / "attempts" / "0").mkdir(parents=True)
    processes = start_program(path, 2)
    while processes[0].stderr is not None and "epoch 2/" not in processes[0].stderr.readline():
        assert processes[0].poll() is None
    request_stop(path / "attempts" / "0" / "STOP", "a test")
    talk = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], talk
    stopped = json.loads((path / "attempts" / "0" / "stopped.json").read_text())
    assert 0 < stopped["step"] < 300 * 9
    assert not (path / "summary.json").exists()
    assert "checkpoint written: a test" in talk[0]
    (path / "attempts" / "1").mkdir()
    (path / "attempts" / "1" / "STOP").touch()
    again = start_program(path, 2, CLUSTERDDP_ATTEMPT="1")
    talk = [process.communicate(timeout=120)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0], talk
    assert f"resumed from step-{stopped['step']:08d}-a0.pt" in talk[0]


# -- what a plan says


def test_a_checked_spec_comes_through_a_plan_unchanged() -> None:
    train = {"epochs": 3, "lr": 1, "samples": 500, "deterministic": True, "data_dir": "/data"}
    checked = model.JobSpec.model_validate({"name": "a", "train": train})
    section = json.loads(json.dumps(checked.model_dump(mode="json")["train"]))
    assert TrainSpec.from_json(section) == checked.train


def test_a_key_that_plans_of_earlier_versions_have_is_passed_over() -> None:
    assert TrainSpec.from_json({"epochs": 3, "comm_allow": []}) == TrainSpec(epochs=3)


def test_a_key_of_a_later_version_is_named() -> None:
    with pytest.raises(ClusterddpError, match=r"the plan has train.teleport, which this version does not know"):
        TrainSpec.from_json(TINY | {"teleport": True})


def test_data_goes_where_the_submitting_side_expects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache in ("/somewhere", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert default_data_dir() == platformdirs.user_cache_path("clusterddp") / "datasets"


def test_hashes_depend_on_name_shape_type_and_values() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    variants = [
        [("a", tensor)],
        [("b", tensor)],
        [("a", tensor.view(2, 3))],
        [("a", tensor.double())],
        [("a", tensor + 1)],
        [("a", tensor), ("b", tensor)],
    ]
    assert len({tensors_sha256(variant) for variant in variants}) == len(variants)
    image = torch.randn(2, 3, 4, 4)
    assert tensors_sha256([("a", image)]) == tensors_sha256([("a", image.to(memory_format=torch.channels_last))])
    assert tensors_sha256([("a", tensor), ("b", image)]) == tensors_sha256([("b", image), ("a", tensor)])


# -- what people see


@pytest.mark.parametrize(
    ("eta_s", "words"),
    [(31.4, "31 s"), (119.7, "120 s"), (720, "12 min"), (11_400, "3 h 10 min"), (7_199, "2 h 0 min")],
)
def test_a_report_of_steps_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], eta_s: float, words: str
) -> None:
    schedule = plan_schedule(TrainSpec(epochs=10), num_samples=391 * 128, world_size=1)
    Reporter(RunDir(make_run(tmp_path / "run")), attempt=0, first=True).train(
        schedule,
        epoch=3,
        step=902,
        steps_total=3910,
        step_in_epoch=120,
        loss=0.8123,
        accuracy=0.7131,
        lr=0.16123,
        figures={"images_per_s": 1512.4},
        train_seconds=12.5,
        checkpoint_seconds=0.5,
        eta_s=eta_s,
    )
    assert capsys.readouterr().err == (
        f"epoch 3/10 step 120/391 loss 0.812 acc 71.3 % lr 0.161 1,512 img/s eta {words}\n"
    )
