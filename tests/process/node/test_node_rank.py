"""The start-up of a rank that the test itself starts: with and without a supervisor's variables."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.single_ranks import run_rank, start_rank, write_script
from tests.support.slow_gloo import STARVE_GLOO

REPORT = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "path": sys.path[:3], "cwd": os.getcwd(), "name": __name__,
                  "modules": sorted(sys.modules)}))
"""


def test_a_script_runs_as_plain_python_would_run_it(tmp_path):
    script = write_script(tmp_path, REPORT)
    code, out, _ = run_rank(tmp_path / "run", {"target": str(script), "args": ["--lr", "0.1"]})
    report = json.loads(out)
    assert code == 0
    assert report["argv"] == [str(script), "--lr", "0.1"]
    assert report["path"][0] == str(script.parent)
    assert str(tmp_path / "run") not in report["path"]
    assert (report["cwd"], report["name"]) == (str(tmp_path / "run"), "__main__")


def test_a_module_runs_from_the_working_directory_behind_the_import_paths(tmp_path):
    for place in ("snapshot", "work"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "job.py").write_text(f"place = {place!r}\n" + REPORT + "print(place)")
    entry = {"kind": "module", "target": "job", "working_dir": str(tmp_path / "work")}
    entry |= {"import_paths": [str(tmp_path / "snapshot")]}
    code, out, _ = run_rank(tmp_path / "run", entry)
    report, place = out.splitlines()
    assert (code, place) == (0, "snapshot")
    assert json.loads(report)["path"][:2] == [str(tmp_path / "snapshot"), str(tmp_path / "work")]
    assert json.loads(report)["cwd"] == str(tmp_path / "work")


def test_the_ranks_own_numbers_are_filled_into_its_arguments(tmp_path):
    script = write_script(tmp_path, REPORT)
    arguments = ["--rank={rank}", "{local_rank}/{world_size}", "{init_method}", "{other} {}", "plain"]
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    _, out, _ = run_rank(tmp_path / "run", {"target": str(script), "args": arguments}, **environment)
    assert json.loads(out)["argv"][1:] == ["--rank=3", "1/4", "tcp://10.0.0.1:1234", "{other} {}", "plain"]


def test_little_is_imported_before_the_program(tmp_path):
    script = write_script(tmp_path, REPORT)
    _, out, _ = run_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_STOP_FILE=str(tmp_path / "STOP"))
    modules = set(json.loads(out)["modules"])
    heavy = {"torch", "numpy", "psutil", "pydantic", "yaml", "rich", "submitit", "click", "subprocess", "asyncio"}
    assert modules & heavy == set()
    ours = {module for module in modules if module.startswith("clusterddp")}
    assert ours <= {"clusterddp", "clusterddp.errors", "clusterddp.run", "clusterddp.run.directory",
                    "clusterddp.run.stop", "clusterddp.node", "clusterddp.node.rank", "clusterddp.node.entry",
                    "clusterddp.node.stack_hook",
                    "clusterddp.ranks", "clusterddp.ranks.environment",
                    "clusterddp.system", "clusterddp.system.exclusive", "clusterddp.system.files",
                    "clusterddp.system.processes", "clusterddp.wire"}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "code", "err"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('bad')", 1, "bad\n"),
        ("raise SystemExit(True)", 1, ""),
    ],
)
def test_exit_codes_are_kept(tmp_path, program, code, err):
    assert run_rank(tmp_path / "run", {"target": str(write_script(tmp_path, program))}) == (code, "", err)


def test_what_was_printed_before_an_exception_is_not_lost(tmp_path):
    script = write_script(tmp_path, "print('before', end='')\n1 / 0")
    code, out, err = run_rank(tmp_path / "run", {"target": str(script)})
    assert (code, out) == (1, "before")
    assert err.endswith("1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n") or "ZeroDivisionError" in err


def test_an_exception_goes_into_the_error_file_in_torchelastics_form(tmp_path):
    script = write_script(tmp_path, "raise ValueError('a\\nb')")
    path = tmp_path / "error.json"
    before = int(time.time())
    run_rank(tmp_path / "run", {"target": str(script)}, TORCHELASTIC_ERROR_FILE=str(path))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: a\nb"
    assert before <= int(message["extraInfo"]["timestamp"]) <= time.time()
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")


def test_an_exception_that_cannot_be_printed_still_ends_the_rank(tmp_path):
    program = "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Bad"
    code, _, err = run_rank(tmp_path / "run", {"target": str(write_script(tmp_path, program))})
    assert code == 1
    assert "Bad" in err


def test_the_programs_functions_can_be_sent_to_processes_that_it_spawns(tmp_path):
    program = """
import multiprocessing
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(square, [3]))
"""
    assert run_rank(tmp_path / "run", {"target": str(write_script(tmp_path, program))})[:2] == (0, "[9]\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_signal_makes_the_stop_file(tmp_path, number):
    stop_file = tmp_path / "STOP"
    script = write_script(
        tmp_path,
        "import os, time\n"
        "print('up', flush=True)\n"
        "while not os.path.exists(os.environ['CLUSTERDDP_STOP_FILE']): time.sleep(0.01)\n",
    )
    process = start_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_STOP_FILE=str(stop_file), RANK="5")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.wait(10) == 0
    assert json.loads(stop_file.read_text())["reason"] == f"{number.name} to rank 5"
    process.communicate()


@pytest.mark.parametrize(
    ("environ", "size", "prefix"),
    [
        ({"CLUSTERDDP_BACKEND": "gloo"}, "200", None),
        ({"CLUSTERDDP_BACKEND": "gloo", "TORCH_FR_BUFFER_SIZE": "0"}, "0", None),
        ({"CLUSTERDDP_BACKEND": "nccl"}, "2000", "logs/nccl_trace_"),
        ({"CLUSTERDDP_BACKEND": "nccl", "TORCH_FR_BUFFER_SIZE": "7"}, "7", "logs/nccl_trace_"),
        ({"CLUSTERDDP_BACKEND": "nccl", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine"}, "2000", None),
    ],
)
def test_the_flight_recorder_records_and_nccls_writes_beside_the_logs_unless_the_user_says_otherwise(
    tmp_path, environ, size, prefix
):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    script = write_script(tmp_path, f"import os, json\nprint(json.dumps([os.environ.get(name) for name in {names}]))")
    environ = {"CLUSTERDDP_STOP_FILE": str(tmp_path / "STOP"), **environ}
    _, out, _ = run_rank(tmp_path / "run", {"target": str(script)}, **environ)
    assert json.loads(out) == [size, prefix and f"{tmp_path}/{prefix}"]


def test_sigterm_ends_a_rank_whose_gang_is_being_ended(tmp_path):
    (tmp_path / "ENDING").touch()
    script = write_script(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(60)")
    stop_file = tmp_path / "STOP"
    process = start_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_STOP_FILE=str(stop_file))
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    assert not stop_file.exists()
    process.communicate()


def test_a_rank_whose_supervisor_is_already_dead_does_not_run(tmp_path):
    script = write_script(tmp_path, "print('ran')")
    code, out, _ = run_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_SUPERVISOR_PID="1")
    assert (code, out) == (-signal.SIGKILL, "")


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_rank_dies_with_the_process_that_started_it(tmp_path):
    script = write_script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    (tmp_path / "run").mkdir()
    entry = {"kind": "script", "target": str(script), "args": [], "working_dir": "/", "import_paths": []}
    (tmp_path / "run" / "plan.json").write_text(json.dumps({"gang": {"entry": entry}}))
    parent_code = (
        "import os, subprocess, sys\n"
        "env = dict(os.environ, CLUSTERDDP_SUPERVISOR_PID=str(os.getpid()))\n"
        "subprocess.run([sys.executable, '-m', 'clusterddp.node.rank', sys.argv[1]], env=env)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_a_stop_signal_that_comes_when_the_program_has_ended_does_not_end_it(tmp_path):
    script = write_script(
        tmp_path, "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
    )
    stop_file = tmp_path / "STOP"
    code, _, _ = run_rank(tmp_path / "run", {"target": str(script)}, CLUSTERDDP_STOP_FILE=str(stop_file))
    assert (code, stop_file.exists()) == (0, False)


SLOW_GLOO = (
    STARVE_GLOO
    + """
import sys
import torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    dist.all_reduce(torch.ones(1))
    starve_gloo()
    dist.all_reduce(torch.ones(1))
main()
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="sets the scheduler of single threads")
@pytest.mark.slow
def test_a_rank_that_is_done_waits_for_the_threads_of_its_process_group(tmp_path):
    """A thread that wakes this one when a tensor has come, and lets go of it later: seven of eight ranks aborted."""
    script = write_script(tmp_path, SLOW_GLOO)
    for meeting in range(2):
        ranks = [
            start_rank(
                tmp_path / f"run{rank}", {"target": str(script), "args": [str(tmp_path / f"meet{meeting}"), str(rank)]}
            )
            for rank in range(2)
        ]
        talk = [rank.communicate(timeout=240)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], talk
