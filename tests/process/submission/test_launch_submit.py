"""The making of a run: whole or not at all, whatever the disk, another submit or a SIGKILL does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.staging import make_run
from clusterddp.places.state import read_state
from clusterddp.planning.plan import Plan
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.record import read_run
from clusterddp.run.seal import is_sealed
from clusterddp.run.state import RunState
from clusterddp.submission.submit import start_attempt, submit, wait
from clusterddp.system.file_set import has_digest
from tests.support.launch_runs import git, plan_script, plan_text, read_plan
from tests.support.waiting import wait_until

NUM_SUBMITS = 8
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small file system")


def in_child(action: Callable[[], object]) -> int:
    """Do something in a child process; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with these options; it goes with the test."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def staged(runs_dir: Path) -> list[str]:
    return [path.name for path in runs_dir.glob(".staging-*")]


def assert_whole(run: RunDir) -> None:
    """Everything that a submit prepares is there and belongs together."""
    record, plan = read_run(run), read_plan(run)
    assert record.run == plan["run"] == plan["gang"]["run"] == run.name
    assert record.token == plan["token"]
    assert json.loads(run.environment.read_text())["packages"]
    assert run.spec.read_text() == plan["spec_text"]
    assert run.attempt(0).ranks.is_dir()
    assert (run.code / "entry.py").is_file()


def test_a_run_is_whole_before_it_is_started(tmp_path: Path) -> None:
    plan = make_run(plan_script(tmp_path), os.environ)
    run = RunDir(plan.run_dir)
    assert_whole(run)
    assert read_state(run).state is RunState.PENDING
    assert staged(tmp_path / "runs") == []


def test_a_run_is_for_its_owners_eyes_alone(tmp_path: Path) -> None:
    plan = make_run(plan_script(tmp_path), os.environ)
    for path in [plan.run_dir, *plan.run_dir.rglob("*")]:
        mode = path.lstat().st_mode
        assert stat.S_ISLNK(mode) or stat.S_IMODE(mode) & 0o077 == 0, path


def test_the_plan_is_what_was_written(tmp_path: Path) -> None:
    plan = plan_script(tmp_path)
    written = read_plan(RunDir(make_run(plan, os.environ).run_dir))
    assert is_sealed(written)
    assert written == json.loads(json.dumps(plan.to_json())) | {"seal": written["seal"]}


def test_a_new_runs_directory_is_ignored_by_git(tmp_path: Path) -> None:
    git(tmp_path, "init")
    make_run(plan_script(tmp_path), os.environ)
    assert git(tmp_path, "status", "--porcelain") == "?? entry.py\n"


def test_the_sum_of_the_code_is_in_the_surroundings(tmp_path: Path) -> None:
    run = RunDir(make_run(plan_script(tmp_path), os.environ).run_dir)
    code = json.loads(run.environment.read_text())["code"]
    assert has_digest(run.code, code["sha256"])
    assert has_digest(tmp_path / "runs" / ".code" / code["sha256"], code["sha256"])
    assert code["files"] == 1


def test_a_name_that_was_taken_since_the_plan_gives_way_to_a_fresh_one(tmp_path: Path) -> None:
    plan = plan_script(tmp_path)
    plan.run_dir.mkdir(parents=True)
    (plan.run_dir / "theirs").write_text("")
    made = make_run(plan, os.environ)
    assert made.run != plan.run
    assert_whole(RunDir(made.run_dir))
    assert made.gang.entry.target == str(made.run_dir / "code" / "entry.py")
    assert os.listdir(plan.run_dir) == ["theirs"]


@needs_root
@pytest.mark.parametrize("limit", ["size={}k", "nr_inodes={}"])
def test_a_full_disk_leaves_nothing_behind_wherever_it_fills_up(
    tmp_path: Path, mounted: Callable[[str], Path], limit: str
) -> None:
    text = plan_script(tmp_path).spec_text
    num_refusals = 0
    for amount in range(4, 400, 4 if "k" in limit else 2):
        runs_dir = mounted(limit.format(amount))
        plan = plan_text(text, tmp_path, runs_dir=runs_dir)
        with contextlib.suppress(ClusterddpError):
            make_run(plan, os.environ)
            break
        with pytest.raises(ClusterddpError, match="nothing was submitted: No space left on device"):
            make_run(plan, os.environ)
        assert (list_runs(runs_dir), staged(runs_dir)) == ([], [])
        num_refusals += 1
    assert_whole(list_runs(runs_dir)[0])
    assert num_refusals >= 4


@needs_root
def test_a_read_only_file_system_is_refused(tmp_path: Path, mounted: Callable[[str], Path]) -> None:
    place = mounted("ro")
    for runs_dir in (place, place / "runs"):
        plan = plan_text(plan_script(tmp_path).spec_text, tmp_path, runs_dir=runs_dir)
        with pytest.raises(ClusterddpError, match="nothing was submitted: Read-only file system"):
            make_run(plan, os.environ)


def test_a_directory_of_another_user_is_refused() -> None:
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    try:
        plan = plan_script(base)
        (base / "runs").mkdir()
        (base / "runs").chmod(0o555)

        def refused() -> None:
            if os.getuid() == 0:
                os.setuid(65534)
            with pytest.raises(ClusterddpError, match="nothing was submitted: Permission denied"):
                make_run(plan, {})

        assert os.waitpid(in_child(refused), 0)[1] == 0
        assert os.listdir(base / "runs") == []
    finally:
        (base / "runs").chmod(0o755)
        shutil.rmtree(base)


def test_a_runs_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ClusterddpError, match="nothing was submitted: Not a directory"):
        make_run(plan_script(tmp_path), os.environ)


def test_what_a_killed_submit_left_is_swept_by_the_next_and_one_under_way_is_not(tmp_path: Path) -> None:
    plan = plan_script(tmp_path)
    make_run(plan, os.environ)
    submitter = read_run(RunDir(plan.run_dir)).submitter
    for name, changes in (("dead", {"started": -1.0}), ("alive", {}), ("elsewhere", {"host": "gpu01"})):
        directory = tmp_path / "runs" / f".staging-{name}"
        directory.mkdir()
        (directory / "run.json").write_text(json.dumps({"submitter": submitter | changes}))
    (tmp_path / "runs" / ".staging-new").mkdir()
    (tmp_path / "runs" / ".staging-old").mkdir()
    os.utime(tmp_path / "runs" / ".staging-old", (1, 1))
    make_run(plan_script(tmp_path), os.environ)
    assert sorted(staged(tmp_path / "runs")) == [".staging-alive", ".staging-elsewhere", ".staging-new"]


def test_a_secret_must_still_be_set_when_the_plan_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_script(tmp_path, more="secrets: [API_KEY]", environ={"API_KEY": "hunter2"})
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(UsageError, match="API_KEY not set"):
        submit(plan)
    assert not (tmp_path / "runs").exists()


def test_a_secrets_value_is_nowhere_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2hunter2")
    code = "import os\nassert len(os.environ['API_KEY']) == 14\n"
    submitted = submit(plan_script(tmp_path, code, more="secrets: [API_KEY]", environ=os.environ, resources="{}"))
    assert wait(RunDir(submitted.run_dir), 30).state is RunState.COMPLETED
    found = subprocess.run(["grep", "-r", "hunter2hunter2", str(submitted.run_dir)], check=False, capture_output=True)
    assert (found.returncode, found.stdout) == (1, b"")


def test_a_start_that_fails_is_the_runs_recorded_end(tmp_path: Path) -> None:
    plan = plan_script(tmp_path)
    made = make_run(plan, os.environ)
    (made.run_dir / "launcher" / "submitit").write_text("in the way")
    with pytest.raises(ClusterddpError, match=r"could not be started: FileExistsError: .*launcher/submitit"):
        start_attempt(RunDir(made.run_dir), 0)
    view = read_state(RunDir(made.run_dir))
    assert view.state is RunState.FAILED
    assert view.end is not None
    assert view.end.root_cause is not None
    assert "could not be started" in view.end.root_cause.error
    assert view.end.root_cause.log == "launcher/submit.log"


MOMENTS: dict[str, tuple[str, Callable[[str], bool], list[RunState]]] = {
    "before anything is there": ("os.mkdir", lambda words: ".staging-" in words, []),
    "before its name is written": ("os.rename", lambda words: "run.json'" in words, []),
    "before the surroundings are written": ("os.rename", lambda words: "env.json'" in words, []),
    "before the run has its place": (
        "os.rename",
        lambda words: re.search(r"/\.staging-\w+', '", words) is not None,
        [],
    ),
    "before it is started": ("subprocess.Popen", lambda words: "clusterddp" in words, [RunState.LOST]),
    "when it is started": ("", lambda words: False, [RunState.COMPLETED]),
}
"""Of the events that Python sends its auditors: the last one, and the states of the runs that are left."""


def submit_until(plan: Plan, event: str, is_moment: Callable[[str], bool]) -> None:
    """Submit, and be killed when this event is about to happen; at the latest when the submit returns."""

    def hear(name: str, arguments: tuple[object, ...]) -> None:
        if name == event and is_moment(repr(arguments)):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    submit(plan)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_submitter_that_is_killed_leaves_a_true_record(tmp_path: Path, moment: str) -> None:
    """At a few moments that were chosen; `benchmarks/random_kills.py SEED COUNT submit` draws them."""
    event, is_moment, states = MOMENTS[moment]
    runs_dir = tmp_path / "runs"
    plan = plan_script(tmp_path, resources="{}")
    killed = os.waitpid(in_child(lambda: submit_until(plan, event, is_moment)), 0)[1]
    assert os.WTERMSIG(killed) == signal.SIGKILL
    runs = list_runs(runs_dir)
    for run in runs:
        assert_whole(run)
    assert [wait(run, 30).state for run in runs] == states
    assert [run.attempt(0).end.exists() for run in runs] == [state is RunState.COMPLETED for state in states]
    for name in staged(runs_dir):
        if not (runs_dir / name / "run.json").exists():  # killed before it wrote its name: swept when it is old
            os.utime(runs_dir / name, (1, 1))
    make_run(plan_script(tmp_path), os.environ)
    assert staged(runs_dir) == []


def test_eight_submits_at_once_are_eight_runs(tmp_path: Path) -> None:
    plans = [plan_script(tmp_path, resources="{}") for _ in range(NUM_SUBMITS)]
    children = [in_child(lambda plan=plan: submit(plan)) for plan in plans]  # type: ignore[misc]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * NUM_SUBMITS
    runs = list_runs(tmp_path / "runs")
    assert len(runs) == NUM_SUBMITS
    assert [wait(run, 60).state for run in runs] == [RunState.COMPLETED] * NUM_SUBMITS
    assert len({read_run(run).token for run in runs}) == NUM_SUBMITS
    wait_until(lambda: len(os.listdir(tmp_path / "runs" / ".code")) == 1)
