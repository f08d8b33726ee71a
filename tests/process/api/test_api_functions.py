"""Functions from Python: they travel as submitit's submission, and what they return comes back."""

from __future__ import annotations

import functools
import importlib
import os
import re
import stat
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

import clusterddp
from clusterddp.api import Run
from clusterddp.errors import ClusterddpError, RankError, RunCancelledError, RunFailedError, UsageError
from clusterddp.places import functions
from clusterddp.run.call import PYTHON
from clusterddp.run.directory import RunDir
from tests.support.launch_runs import git

TWO = ["resources.procs_per_node=2"]
JOBS = """
import os, threading

def train(lr, *, sizes=(), out=None):
    print(os.environ["RANK"], lr, sizes, out, flush=True)
    return {"rank": int(os.environ["RANK"]), "lr": lr}

class Trainer:
    def __init__(self, lr): self.lr = lr
    def __call__(self, factor): return self.lr * factor

def fail(text):
    if os.environ["RANK"] == "1": raise ValueError(text)
    return 0

def lock(): return threading.Lock()

def leave(): raise SystemExit(0)

def double(tensor):
    return tensor * 2
"""


@pytest.fixture(autouse=True)
def _in_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    (tmp_path / "job.yaml").write_text("name: job\nresources: {procs_per_node: 2}\nentry: {script: entry.py}\n")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's, imported from where they submit."""
    name = f"jobs_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(JOBS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


def test_a_function_is_called_by_each_rank_and_its_results_come_back(jobs: ModuleType) -> None:
    run = clusterddp.submit(
        jobs.train, TWO, args=[0.1], kwargs={"sizes": (1, {"a": "😀\u2028: ${HOME}"}), "out": "{rank}"}
    )
    assert run.results() == [{"rank": 0, "lr": 0.1}, {"rank": 1, "lr": 0.1}]
    assert run.result() == {"rank": 0, "lr": 0.1}
    assert run.logs(1) == "1 0.1 (1, {'a': '😀\\u2028: ${HOME}'}) 1\n"
    assert clusterddp.load_spec(run.path / "spec.yaml").job.name == "train"


def test_closures_lambdas_and_instances_travel(jobs: ModuleType) -> None:
    secret = "captured"

    def outer(word: str) -> tuple[str, str]:
        return secret, word

    runs = [
        clusterddp.submit(functools.partial(outer, "partial")),
        clusterddp.submit(lambda number: number + 1, args=[41]),
        clusterddp.submit(jobs.Trainer(0.5), args=[4]),
        clusterddp.submit(os.path.join, args=["a", "b"]),
    ]
    assert [run.result() for run in runs] == [("captured", "partial"), 42, 2.0, "a/b"]
    names = [clusterddp.load_spec(run.path / "spec.yaml").job.name for run in runs]
    assert names == ["outer", "lambda", "Trainer", "join"]
    submission = RunDir(runs[0].path).submission
    assert stat.S_IMODE(submission.stat().st_mode) == 0o600
    assert stat.S_IMODE(RunDir(runs[0].path).attempt(0).result(0).stat().st_mode) == 0o600
    assert DelayedSubmission.load(submission).function.args == ("partial",)


def test_tensors_travel_both_ways(jobs: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    run = clusterddp.submit(jobs.double, args=[torch.arange(3)])
    assert torch.equal(run.result(), torch.tensor([0, 2, 4]))


def test_an_exception_arrives_with_the_traceback_of_its_rank(jobs: ModuleType) -> None:
    run = clusterddp.submit(jobs.fail, TWO, args=["no more"])
    with pytest.raises(RankError) as raised:
        run.results()
    error = raised.value
    assert (error.rank, error.host, error.exit_code) == (1, run.status()["ranks"][1]["host"], 5)
    assert error.traceback.splitlines()[-1] == "ValueError: no more"
    assert f'{jobs.__name__}.py", line ' in error.traceback
    assert "clusterddp/" not in error.traceback
    assert error.message.startswith(f"{run.name}: rank 1 on {error.host}: ValueError: no more\n\nTraceback")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lock", "the lock that the function returned cannot be pickled"),
        ("leave", "rank 0 left no result"),
    ],
)
def test_a_call_without_a_result_says_why(jobs: ModuleType, name: str, words: str) -> None:
    run = clusterddp.submit(getattr(jobs, name))
    with pytest.raises(RunFailedError, match=words):
        run.result()


def test_a_run_that_was_cancelled_or_calls_no_function_has_no_results(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    run = clusterddp.submit("job.yaml")
    with pytest.raises(UsageError, match="has no results"):
        run.results()
    run = clusterddp.submit(lambda: __import__("time").sleep(120))
    run.cancel()
    with pytest.raises(RunCancelledError):
        run.results()


def test_a_function_takes_the_rest_of_its_spec_from_a_file_and_the_plan_shows_the_call(jobs: ModuleType) -> None:
    plan = clusterddp.plan(jobs.train, base="job.yaml", args=[{"a": 1}], kwargs={"out": "x" * 1000})
    entry = plan.gang.entry
    assert (plan.name, plan.gang.world_size, entry.kind, entry.args, entry.kwargs) == ("job", 2, "function", (), {})
    place, _, call = entry.target.partition(":")
    assert place == str(plan.run_dir / "code" / Path(jobs.__file__ or "").name)
    assert re.fullmatch(r"train\(\{'a': 1\}, out='x+\.\.\.x+'\)", call)
    assert str(plan.run_dir / "submission.pkl") in plan.files
    assert "submission" not in plan.to_json()


def test_the_plan_says_what_a_container_needs(jobs: ModuleType) -> None:
    in_container = ["launcher=slurm", "container.image=docker://a/b", "container.runtime=pyxis"]
    plan = clusterddp.plan(jobs.train, in_container, args=[1])
    assert f"the image needs Python {PYTHON} with cloudpickle and submitit" in plan.notes[-1]


def test_a_function_of_a_script_finds_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub/go.py"
    script.write_text(
        "import clusterddp, helper\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def train(lr): return helper.WORD, Point(lr)\n"
        "if __name__ == '__main__':\n"
        "    word, point = clusterddp.submit(train, args=[0.1]).result()\n"
        "    print(word, isinstance(point, Point), point.x)\n"
    )
    (tmp_path / "sub/helper.py").write_text("WORD = 'here'\n")
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "here True 0.1\n"


def test_a_module_elsewhere_in_the_repository_is_taken_from_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"pack_{uuid.uuid4().hex}"
    (tmp_path / "src" / package).mkdir(parents=True)
    (tmp_path / "src" / package / "jobs.py").write_text("def where(): return __file__\n")
    git(tmp_path, "init", "-q")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    run = clusterddp.submit(importlib.import_module(f"{package}.jobs").where)
    assert run.result() == str(run.path / "code" / "src" / package / "jobs.py")


@pytest.mark.parametrize("words", [["-c"], ["-i", "-c"]])
def test_a_function_without_a_file_travels(words: list[str]) -> None:
    """As in a notebook: it is of the module __main__, which has no file."""
    code = "import clusterddp\nword = 'here'\ndef train(): return word\nprint(clusterddp.submit(train).result())"
    done = subprocess.run(
        [sys.executable, *words, code], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.stdout.strip() == "here"


def test_a_restart_and_a_repetition_load_the_same_pickle(jobs: ModuleType) -> None:
    def train() -> str:
        if os.environ["CLUSTERDDP_ATTEMPT"] == "0":
            raise ValueError("again")
        return os.environ["CLUSTERDDP_ATTEMPT"]

    run = clusterddp.submit(train, ["restarts=1"])
    assert run.result() == "1"
    command = [sys.executable, "-m", "clusterddp", "submit", run.name, "restarts=0"]
    subprocess.run(command, check=True, capture_output=True)
    again = Run.find("@last")
    assert again != run
    with pytest.raises(RankError, match="again"):
        again.result()
    command = [sys.executable, "-m", "clusterddp", "resume", again.name, "restarts=2"]
    subprocess.run(command, check=True, capture_output=True)
    assert again.result() == "1"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "missing a required argument: 'lr'"),
        ([threading.Lock()], "train cannot be pickled with its arguments: TypeError: "),
    ],
)
def test_a_function_that_cannot_be_called_or_pickled_is_refused(jobs: ModuleType, args: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        clusterddp.plan(jobs.train, args=args)


def test_a_large_pickle_is_refused_with_a_hint(jobs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_PICKLE_BYTES", 10_000_000)
    with pytest.raises(UsageError, match=r"take 0\.0 GB pickled") as raised:
        clusterddp.plan(jobs.double, args=[b"x" * 10_000_000])
    assert raised.value.hint == "save what is large to a file, and pass its path"


def test_a_call_of_no_pickle_in_a_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was submitted from Python; its pickle is in the run"):
        clusterddp.submit("name: a\nentry: {function: 'os:getcwd()'}\n")
    assert not list((tmp_path / "runs").glob("a-*"))


def test_a_function_that_another_python_has_pickled_is_not_loaded(jobs: ModuleType) -> None:
    run = clusterddp.submit(jobs.train, args=[1])
    run.wait()
    submission = RunDir(run.path).submission
    data = submission.read_bytes()
    submission.write_bytes(data.replace(f'"python": "{PYTHON}"'.encode(), b'"python": "3.99"'))
    command = [sys.executable, "-m", "clusterddp", "submit", run.name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert f"the function was pickled by Python 3.99, and this is {PYTHON}" in done.stderr
    assert done.returncode == 2


@pytest.mark.root
def test_a_pickle_of_another_user_is_not_loaded(jobs: ModuleType) -> None:
    run = clusterddp.submit(jobs.train, args=[1])
    assert run.wait() == "COMPLETED"
    os.chown(RunDir(run.path).attempt(0).result(0), 12345, -1)
    with pytest.raises(ClusterddpError, match=r"belongs to another user \(uid 12345\)"):
        run.result()
