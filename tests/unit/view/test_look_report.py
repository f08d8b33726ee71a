"""What a report knows of a run: curves of any length, attempts, what it was made of, and how runs differ."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from clusterddp.run.attempts import AttemptEnd, write_end
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_run
from clusterddp.system.files import append_jsonl, read_json, write_json
from clusterddp.view.background import HIDDEN, compare_folders, config_texts, read_background, read_uncommitted
from clusterddp.view.curves import Curve, read_curves
from clusterddp.view.report import RunReport, compare, read_reports
from tests.support.handmade_runs import complete, fail, make_run, start_attempt, train


def write_rows(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report_of(run: RunDir) -> RunReport:
    return read_reports([run], os.environ)[0]


def set_plan(run: RunDir, **changes: object) -> None:
    plan = read_json(run.plan)
    assert isinstance(plan, dict)
    write_json(run.plan, plan | changes)


def test_a_short_file_is_read_row_by_row(tmp_path: Path) -> None:
    rows = [{"kind": "train", "step": step, "loss": 1 / step, "step_ms": {"p50": 3.0}} for step in range(1, 51)]
    curves = read_curves(write_rows(tmp_path / "metrics.jsonl", *rows))
    assert (curves.read_rows, curves.total_rows) == (50, 50)
    assert curves.curves["loss", "train"].values == [1 / step for step in range(1, 51)]
    assert curves.curves["step_ms.p50", "train"].last == 3.0


def test_any_key_of_a_scripts_own_row_is_a_curve(tmp_path: Path) -> None:
    rows = [{"kind": "log", "step": step, "val/iou": step / 10, "on": True, "note": "x"} for step in range(4)]
    curves = read_curves(write_rows(tmp_path / "metrics.jsonl", *rows))
    assert list(curves.curves) == [("val/iou", "log")]
    assert curves.newest_logged() == {"val/iou": 0.3}


def test_of_a_million_rows_a_sample_is_read_and_every_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train_row = b'{"kind": "train", "attempt": 0, "step": %d, "loss": 0.5, "lr": 0.1, "time": 1}\n'
    eval_row = b'{"kind": "eval", "attempt": 0, "step": %d, "loss": 0.4, "accuracy": 0.%04d, "time": 1}\n'
    with path.open("wb") as file:
        for begin in range(0, 1_000_000, 1000):
            file.write(b"".join(train_row % step for step in range(begin, begin + 1000)))
            file.write(eval_row % (begin + 999, 9999 if begin == 500_000 else begin // 1000))
            if begin == 500_000:
                file.write(b'{"kind": "train", "attempt": 0, "step": 500000, "loss": NaN, "time": 1}\n')
        file.write(b'{"kind": "train", "attempt": 0, "step": 1000000, "loss": 0.25, "time": 1}\n')
    curves = read_curves(path)
    accuracy = curves.curves["accuracy", "eval"]
    assert len(accuracy.values) == 1000
    assert accuracy.best(highest=True) == (0.9999, 500_999)
    assert accuracy.last == 0.0999
    assert curves.curves["loss", "train"].not_finite == 500_000
    assert curves.curves["loss", "train"].steps[-1] == 1_000_000
    assert 9_000 < curves.read_rows < 20_000
    assert curves.total_rows == pytest.approx(1_001_002, rel=0.01)


def test_rows_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'\xff\xfe\n[1]\n{"kind": 7, "step": {}, "loss": 1e999}\n' + b"[" * 100_000 + b'\n{"step": 1, "a": 2}\n{"step"'
    )
    curves = read_curves(path)
    assert curves.curves["a", "log"].values == [2.0]
    assert curves.curves["loss", "log"].not_finite is not None


def test_the_number_of_keys_is_bounded(tmp_path: Path) -> None:
    rows = [{"kind": "log", "step": step, f"key{step}": 1} for step in range(500)]
    curves = read_curves(write_rows(tmp_path / "metrics.jsonl", *rows))
    assert len(curves.curves) == 200


def test_no_file_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "metrics.jsonl").curves == {}


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_curves(tmp_path / "metrics.jsonl").curves == {}


def test_a_later_attempt_replaces_the_steps_that_it_repeats() -> None:
    curve = Curve("loss", "train")
    for attempt, steps in ((0, range(1, 6)), (1, range(4, 8))):
        for step in steps:
            curve.add(step, attempt, attempt)
    assert curve.steps == [1, 2, 3, 4, 5, 6, 7]
    assert curve.values == [0, 0, 0, 1, 1, 1, 1]


def test_steps_that_begin_anew_in_each_epoch_count_on() -> None:
    curve = Curve("loss", "log")
    for _ in range(2):
        for step in range(3):
            curve.add(step, step, None)
    assert curve.steps == [0, 1, 2, 3, 4, 5]


def test_thinning_keeps_the_ends_and_every_spike() -> None:
    curve = Curve("loss", "train", steps=list(map(float, range(10_000))), values=[1.0] * 10_000)
    curve.values[7_777] = 99.0
    curve.values[3_333] = -5.0
    points = curve.thinned(100)
    assert len(points) <= 100
    assert (points[0][0], points[-1][0]) == (0.0, 9_999.0)
    assert {(7_777.0, 99.0), (3_333.0, -5.0)} <= set(points)


def test_a_report_has_results_and_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path, created_ns=1_000_000 * 10**9)
    train(run, steps=100)
    first, second = start_attempt(run), start_attempt(run, 1)
    for attempt, started in ((first, 1_000_010.0), (second, 1_000_100.0)):
        start = read_json(attempt.start)
        assert isinstance(start, dict)
        write_json(attempt.start, start | {"started": started})
    write_end(first, AttemptEnd(outcome="STOPPED", reason="time", will_restart=True, ended=1_000_050.0))
    append_jsonl(run.events, {"event": "requeued", "attempt": 1, "time": 1_000_060.0})
    write_end(second, AttemptEnd(outcome="COMPLETED", reason="all ended", ended=1_000_150.0))
    write_json(run.summary, {"train_seconds": 70.0, "accuracy": 0.6})
    report = report_of(run)
    assert [(span.waited_s, span.ran_s) for span in report.timeline.attempts] == [(10.0, 40.0), (40.0, 50.0)]
    assert report.results.rank_hours == 2 * 90.0 / 3600
    assert (report.results.accuracy, report.results.best_accuracy, report.results.best_step) == (0.6, 0.6, 100)


def test_a_run_that_failed_has_its_cause_and_the_end_of_that_log(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fail(start_attempt(run))
    report = report_of(run)
    assert report.log == "attempts/0/logs/rank-001.err"
    assert report.log_lines[-1] == "ValueError: the loss is nan"


def test_a_run_without_an_attempt_has_a_report(tmp_path: Path) -> None:
    report = report_of(make_run(tmp_path))
    assert (report.timeline.attempts, report.results.effective, report.results.accuracy) == ((), None, None)


def test_damaged_files_leave_their_parts_empty(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    complete(run, start_attempt(run))
    for path in (run.environment, run.summary, run.checkpoints / "step-1.json"):
        path.write_text("{")
    assert report_of(run).background.packages == {}


def test_secret_variables_of_the_spec_are_not_shown() -> None:
    spec = {
        "env": {"WANDB_API_KEY": "abc", "HF_TOKEN": "abc", "PRIVATE_URL": "abc", "OMP": "1"},
        "train": {"lr": 0.1, "ema": None},
    }
    assert config_texts(spec) == {
        "env.WANDB_API_KEY": HIDDEN,
        "env.HF_TOKEN": HIDDEN,
        "env.PRIVATE_URL": HIDDEN,
        "env.OMP": "1",
        "train.lr": "0.1",
    }


HF = "hf_" + "a" * 30


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({"args": ["--token", "abc", "--lr", "1"]}, {"entry.args.token": HIDDEN, "entry.args.lr": "1"}),
        ({"args": ["--hf-token=abc"]}, {"entry.args.hf_token": HIDDEN}),
        ({"args": ["wandb.api_key=abc", "lr=1"]}, {"entry.args.wandb.api_key": HIDDEN, "entry.args.lr": "1"}),
        ({"args": ["--push", HF]}, {"entry.args.push": HIDDEN}),
        ({"args": ["--tokenizer_name", "gpt2"]}, {"entry.args.tokenizer_name": "gpt2"}),
        ({"args": ["--max-tokens", "9", "--key_dim", "8"]}, {"entry.args.max_tokens": "9", "entry.args.key_dim": "8"}),
        ({"args": ["--use-auth-token", "--lr", "1"]}, {"entry.args.use_auth_token": "true", "entry.args.lr": "1"}),
        ({"args": {"password": "abc", "lr": 1}}, {"entry.args.password": HIDDEN, "entry.args.lr": "1"}),
        ({"command": "python t.py --password 'a b' x"}, {"entry.command": f"python t.py --password {HIDDEN} x"}),
        ({"command": "python t.py 'a  b'"}, {"entry.command": "python t.py 'a  b'"}),
        ({"args": ["s3://user:pass@host/x"]}, {"entry.args.0": HIDDEN}),
    ],
)
def test_an_argument_that_looks_like_a_secret_is_not_shown(entry: dict[str, object], shown: dict[str, str]) -> None:
    assert config_texts({"entry": entry}) == shown


def test_each_argument_of_a_program_is_a_value_of_its_own() -> None:
    assert config_texts({"entry": {"script": "t.py", "args": ["data", "--lr", "0.1"]}}) == {
        "entry.script": "t.py",
        "entry.args.0": "data",
        "entry.args.lr": "0.1",
    }
    args = ["--path", "a", "--path", "b"]
    assert config_texts({"entry": {"args": args}}) == {"entry.args": '["--path", "a", "--path", "b"]'}
    assert config_texts({"entry": {"args": [1, {"a": 2}]}}) == {"entry.args": '[1, {"a": 2}]'}


def test_paths_below_the_directory_of_the_submit_are_relative(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    set_plan(run, working_dir="/trees/1", spec={"entry": {"script": "/trees/1/train.py", "data": "/data"}})
    assert read_background(run, read_run(run)).config == {"entry.script": "train.py", "entry.data": "/data"}


@pytest.mark.parametrize("link", ["code", "snapshot"])
def test_the_code_of_a_run_is_its_snapshot_without_what_the_run_wrote(tmp_path: Path, link: str) -> None:
    run = make_run(tmp_path / "runs")
    stored = tmp_path / "runs" / ".code" / "abc"
    stored.mkdir(parents=True)
    (run.path / link).symlink_to("../.code/abc")
    run.code.mkdir(exist_ok=True)
    assert read_background(run, read_run(run)).code == stored


def test_a_link_out_of_the_store_is_no_code_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    (tmp_path / "private").mkdir()
    run.code.symlink_to(tmp_path / "private")
    assert read_background(run, read_run(run)).code is None


def test_only_what_differs_is_in_a_comparison(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name) for name in ("a-1", "b-2")]
    for run, lr, torch in zip(runs, (0.1, 0.2), ("2.12", "2.13"), strict=True):
        set_plan(run, spec={"train": {"lr": lr, "epochs": 3}})
        write_json(run.environment, {"packages": {"torch": torch, "numpy": "2"}, "git": {"commit": "c0ffee"}})
        complete(run, start_attempt(run))
    found = compare(read_reports(runs, os.environ)).to_json()
    assert found["schema"] == 1
    assert found["differences"] == {
        "spec": {"train.lr": {"a-1": "0.1", "b-2": "0.2"}},
        "packages": {"torch": {"a-1": "2.12", "b-2": "2.13"}},
        "machine": {},
        "places": {},
        "code": {},
    }
    assert json.loads(json.dumps(found))["runs"][0]["run"] == "a-1"


def test_code_is_compared_file_by_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for root, text in ((old, "lr = 1\n"), (new, "lr = 2\n")):
        root.mkdir()
        (root / "train.py").write_text(text)
        (root / "same.py").write_text("x\n")
        (root / "data.bin").write_bytes(b"\0" + text.encode())
    (new / "added.py").write_text("y\n")
    diffs = {diff.path: (diff.change, diff.lines) for diff in compare_folders(old, new)}
    assert diffs == {
        "train.py": ("changed", ("@@ -1 +1 @@", "-lr = 1", "+lr = 2")),
        "data.bin": ("changed", ()),
        "added.py": ("added", ("@@ -0,0 +1 @@", "+y")),
    }


def test_uncommitted_changes_are_the_snapshot_against_its_commit(tmp_path: Path) -> None:
    root, code = tmp_path / "repository", tmp_path / "code"
    for folder in (root, code):
        folder.mkdir()
        (folder / "kept.py").write_text("same\n")
        (folder / "train.py").write_text("lr = 1\n")
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (code / "train.py").write_text("lr = 2\n")
    (code / "new.py").write_text("n\n")
    diffs = read_uncommitted(code, root, commit, os.environ)
    assert [(diff.path, diff.change) for diff in diffs] == [("new.py", "added"), ("train.py", "changed")]
    assert diffs[1].lines == ("@@ -1 +1 @@", "-lr = 1", "+lr = 2")
