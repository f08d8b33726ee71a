"""Ranks that are forked from one process: what they share, what is their own, and when they are not forked."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.ranks.environment import OF_THE_ATTEMPT
from clusterddp.run.gang import Entry
from clusterddp.run.preload import find_preload
from tests.support.gang_runs import make_gang, parent_of, running, started
from tests.support.single_ranks import run_rank, write_script
from tests.support.waiting import wait_until

DIFFERENT = OF_THE_ATTEMPT | {"TORCHELASTIC_ERROR_FILE"}
FAILS_ONCE = """
import ctypes, numpy
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
assert libc.getenv(b"CLUSTERDDP_ATTEMPT").decode() == str(attempt)
up()
if attempt == 0:
    until_stop() if rank != 3 else os._exit(9)
print(rank, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"], numpy.random.rand())
"""


def start_facts(gang, node=0, attempt=0):
    wait_until(gang.attempt(attempt).start.exists)
    return json.loads(gang.attempt(attempt).start.read_text())["nodes"][node]


def package(directory: Path, text: str) -> dict[str, str]:
    """Make a package that a fork server imports; return the environment by which it is found."""
    (directory / "packages" / "numpy").mkdir(parents=True)
    (directory / "packages" / "numpy" / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(directory / "packages")}


def script(directory: Path, text: str, **options) -> Entry:
    (directory / "train.py").write_text(text)
    return Entry(kind="script", target=str(directory / "train.py"), working_dir=str(directory), **options)


def test_forked_ranks_are_children_of_the_supervisor_in_sessions_of_their_own(tmp_path):
    program = """
import ctypes
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
assert os.getsid(0) == os.getpid() == os.getpgid(0)
assert libc.getenv(b"RANK").decode() == os.environ["RANK"]
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
death = ctypes.c_int()
libc.prctl(2, ctypes.byref(death))
assert death.value == signal.SIGKILL
import atexit
atexit.register(Path(f"kept-{rank}").write_text, "written at the end of Python")
until_stop()
"""
    with running(tmp_path, program) as gang:
        gang.await_up()
        assert {parent_of(record.pid) for record in gang.ranks()} == set(gang.supervisors)
        assert start_facts(gang)["import_s"] >= 0
        gang.attempt().stop_file.write_text("enough")
        assert gang.await_end() == [0, 0]
        assert (tmp_path / "kept-3").read_text() == "written at the end of Python"


def test_forked_ranks_draw_different_random_numbers(tmp_path):
    program = """
import random, numpy
(run_dir / f"drawn-{rank}").write_text(f"{random.random()} {numpy.random.rand()}")
"""
    with running(tmp_path, program) as gang:
        assert gang.await_end() == [0, 0]
        drawn = [(gang.run.path / f"drawn-{rank}").read_text().split() for rank in range(4)]
        assert "import_s" in start_facts(gang)
        assert [len(set(column)) for column in zip(*drawn, strict=True)] == [4, 4]


def test_what_the_imports_print_is_in_the_log_of_every_rank(tmp_path):
    env = package(tmp_path, "import os; os.write(1, b'from numpy\\n'); print('a warning')")
    with running(tmp_path, "import numpy\nprint('from the program', file=sys.stderr)", env=env) as gang:
        assert gang.await_end() == [0, 0]
        assert "import_s" in start_facts(gang)
        for rank in range(4):
            assert gang.attempt().stderr(rank).read_text() == "from numpy\na warning\nfrom the program\n"
            assert gang.attempt().stdout(rank).read_text() == ""


@pytest.mark.parametrize(
    ("imported", "reason"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads run"),
        ("import os; os.kill(os.getpid(), 11)", "the fork server ended with SIGSEGV"),
        ("import os; os._exit(3)", "the fork server ended with exit code 3"),
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("raise SystemExit(4)", "SystemExit: 4"),
    ],
)
def test_ranks_are_started_one_by_one_where_they_cannot_be_forked(tmp_path, imported, reason):
    guarded = f"import sys\nif '--fork' in sys.orig_argv:\n    {imported}\n"
    with running(tmp_path, "import numpy\nuntil_stop()\n", env=package(tmp_path, guarded)) as gang:
        gang.await_up()
        wait_until(gang.attempt().start.exists)
        assert [reason in start_facts(gang, node)["not_forked"] for node in (0, 1)] == [True, True]
        gang.attempt().stop_file.write_text("enough")
        assert gang.await_end() == [0, 0]


def test_an_import_that_fails_is_the_error_of_a_rank(tmp_path):
    with running(tmp_path, "import numpy\n", env=package(tmp_path, "raise ImportError('no such library')")) as gang:
        assert gang.await_end() == [1, 1]
        assert "ImportError: no such library" in gang.end().root_cause.error
        assert "import numpy" in gang.end().root_cause.traceback


SLOW = "import sys, time\nif '--fork' in sys.orig_argv:\n    time.sleep(600)\n"


def fork_servers(gang):
    wait_until(lambda: len(gang.pids("n0") + gang.pids("n1")) == 2, what="fork servers")
    return gang.pids("n0") + gang.pids("n1")


def test_a_fork_server_that_is_killed_while_it_imports_costs_the_run_nothing(tmp_path):
    with running(tmp_path, "import numpy\n", env=package(tmp_path, SLOW)) as gang:
        for pid in fork_servers(gang):
            os.kill(pid, signal.SIGKILL)
        assert gang.await_end() == [0, 0]
        assert gang.end().outcome == "COMPLETED"
        assert start_facts(gang)["not_forked"] == "the fork server ended with SIGKILL"


def test_a_run_that_is_cancelled_while_its_ranks_are_imported_for_leaves_nothing(tmp_path):
    with running(tmp_path, "import numpy\n", env=package(tmp_path, SLOW)) as gang:
        fork_servers(gang)
        gang.run.cancel_file.write_text("{}")
        assert gang.await_end() == [0, 0]
        assert gang.end().outcome == "CANCELLED"


def test_a_fork_server_ends_with_its_supervisor(tmp_path):
    with running(tmp_path, "import numpy\n", env=package(tmp_path, SLOW)) as gang:
        fork_servers(gang)
        os.kill(gang.supervisors[1], signal.SIGKILL)
        gang.await_end(after_kill=True)
        assert "supervisor of node 1 on host1" in gang.end().root_cause.error


def test_ranks_that_were_forked_before_the_fork_server_was_killed_never_begin(tmp_path):
    """The second fork of the ranks fails in a fork server whose first rank already waits."""
    broken = """
import os, sys
if "--fork" in sys.orig_argv:
    fork, forks = os.fork, []
    def fork_twice():
        forks.append(fork())
        if len(forks) == 3 and forks[-1]:
            os.kill(os.getpid(), 9)
        return forks[-1]
    os.fork = fork_twice
"""
    program = 'import numpy\n(run_dir / f"begun-{rank}-{os.getpid()}").touch()\n'
    with running(tmp_path, program, env=package(tmp_path, broken)) as gang:
        assert gang.await_end() == [0, 0]
        assert start_facts(gang)["not_forked"] == "the fork server ended with SIGKILL"
        assert len(list(gang.run.path.glob("begun-*"))) == 4


def counted(directory: Path) -> dict[str, str]:
    """Make a numpy whose imports are counted; return the environment by which it is found."""
    text = f"""
import os, random as own
class random:
    seed, rand = staticmethod(own.seed), staticmethod(own.random)
import sys
sys.modules["numpy.random"] = random
with open({str(directory / "imports")!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
"""
    return package(directory, text)


def test_the_next_attempt_is_forked_from_what_was_imported_for_the_first(tmp_path):
    with running(tmp_path, FAILS_ONCE, restarts=1, env=counted(tmp_path)) as gang:
        assert gang.await_end() == [0, 0]
        assert len((tmp_path / "imports").read_text().split()) == 2, "one import for each node"
        assert [start_facts(gang, node, 1)["import_s"] for node in (0, 1)] == [0.0, 0.0]
        rows = [gang.attempt(1).stdout(rank).read_text().split() for rank in range(4)]
        port = json.loads(gang.attempt(1).start.read_text())["master_port"]
        assert [row[:3] for row in rows] == [[str(rank), "1", str(port)] for rank in range(4)]
        assert len({row[3] for row in rows}) == 4, "their random numbers differ"


def test_what_waits_for_the_next_attempt_may_be_killed(tmp_path):
    with running(tmp_path, FAILS_ONCE.replace("rank != 3", "True"), restarts=1, env=counted(tmp_path)) as gang:
        gang.await_up()
        ranks = {record.pid for record in gang.ranks()}
        for pid in {*gang.pids("n0"), *gang.pids("n1")} - ranks:
            os.kill(pid, signal.SIGKILL)
        os.kill(max(ranks), signal.SIGKILL)
        assert gang.await_end() == [0, 0]
        assert gang.end(1).outcome == "COMPLETED"
        assert len((tmp_path / "imports").read_text().split()) == 4


def test_nothing_waits_where_no_attempt_may_follow(tmp_path):
    with running(tmp_path, "import numpy\nup()\nuntil_stop()\n") as gang:
        gang.await_up()
        wait_until(lambda: {*gang.pids("n0"), *gang.pids("n1")} == {record.pid for record in gang.ranks()})
        gang.attempt().stop_file.write_text("enough")
        assert gang.await_end() == [0, 0]


def test_an_entry_may_ask_not_to_be_forked(tmp_path):
    made = make_gang(tmp_path, "")
    made = type(made).from_json(made.to_json() | {"entry": made.to_json()["entry"] | {"fork": False}})
    with started(tmp_path, made) as gang:
        assert gang.await_end() == [0, 0]
        assert start_facts(gang)["not_forked"] == "entry.fork is false"


def test_a_rank_of_its_own_imports_first_and_leaves_what_it_imported_out_of_garbage_collections(tmp_path):
    program = """
import gc, numpy
assert gc.isenabled() and gc.get_freeze_count() > 10_000, gc.get_freeze_count()
assert "CLUSTERDDP_PRELOAD" not in os.environ
"""
    with running(tmp_path, program, ranks_per_node=1) as gang:
        assert gang.await_end() == [0, 0]
        assert start_facts(gang)["not_forked"] == "the node has one rank"


@pytest.mark.parametrize("error", ["ImportError('no such library')", "SystemExit(4)"])
def test_what_can_be_imported_only_once_fails_in_the_program_as_it_would_by_itself(tmp_path, error):
    once = f"""
import os, sys
assert not hasattr(sys, "seen")
sys.seen = True
print(os.getpid(), flush=True)
raise {error}
"""
    path = write_script(tmp_path, "import numpy\n")
    env = package(tmp_path, once)
    code, out, err = run_rank(tmp_path / "run", {"target": str(path)}, CLUSTERDDP_PRELOAD="numpy", **env)
    assert code == (4 if "Exit" in error else 1), err
    assert out.split() == out.split()[:1] * 2, "it stays the process that the supervisor started"
    assert "Exit" in error or ("import numpy\n" in err and err.endswith("ImportError: no such library\n")), err


def test_the_imports_of_an_entry_are_found_without_running_it(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("from . import resnet\n")
    (tmp_path / "models" / "resnet.py").write_text("from torch import nn\nimport torch.nn.functional as F\n")
    entry = script(tmp_path, "import models.vit\nimport lightning\ndef f():\n    import numpy\nraise SystemExit\n")
    assert find_preload(entry).modules == ("torch", "torch.nn.functional", "torch._dynamo")


@pytest.mark.parametrize(
    ("text", "is_imported"),
    [
        ("import os, torch\nimport torch.distributed\n", False),
        ("import os, torch\nimport model\n", False),
        ("import torch\ndef main():\n    torch.optim.SGD([], lr=0.1)\n", True),
        ("import torch\ndef main(model):\n    torch.nn.parallel.DistributedDataParallel(model)\n", True),
        ("import torch\nimport schedules\n", True),
        ("import torch\nimport lightning\n", True),
        ("import torch\nfrom clusterddp.train.group import join_group\n", True),
    ],
)
def test_what_training_imports_is_imported_for_all_where_the_code_may_train(tmp_path, text, is_imported):
    (tmp_path / "model.py").write_text("import math\nimport torch\nclass Model(torch.nn.Module): pass\n")
    (tmp_path / "schedules.py").write_text("from torch.optim.lr_scheduler import LambdaLR\n")
    assert ("torch._dynamo" in find_preload(script(tmp_path, text)).modules) == is_imported


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import json\n", "it imports neither torch nor numpy at its top level"),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", "train.py:2 changes os.environ"),
        ("from os import environ\nenviron.setdefault('A', '4')\nimport torch\n", "train.py:2 changes os.environ"),
        ("import os\ndef f():\n    os.putenv('A', '4')\nf()\nimport torch\n", "train.py:3 changes os.environ"),
        ("import torch, os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'\n", "train.py:2 changes os.environ"),
        ("import settings\nimport torch\n", "settings.py:2 changes os.environ"),
        ("import torch\n1 +\n", "it imports neither torch nor numpy at its top level"),
    ],
)
def test_an_entry_that_may_notice_the_fork_is_not_forked(tmp_path, text, reason):
    (tmp_path / "settings.py").write_text("import os\nos.environ.update(A='b')\n")
    preload = find_preload(script(tmp_path, text))
    assert not preload.modules
    assert reason in preload.why_not


def test_a_package_that_changes_the_environment_before_its_module_runs_is_found(tmp_path):
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '4'\n")
    (package / "train.py").write_text("import torch\n")
    preload = find_preload(Entry(kind="module", target="project.train", working_dir=str(tmp_path)))
    assert "__init__.py:2 changes os.environ" in preload.why_not


def test_a_function_that_changes_the_environment_after_the_imports_does_no_harm(tmp_path):
    text = "import os, torch\ndef main():\n    os.environ['A'] = '1'\nmain()\n"
    assert "torch" in find_preload(script(tmp_path, text)).modules


def test_a_package_of_the_users_that_has_the_name_of_one_that_is_preloaded_is_not_imported_for_all(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    assert not find_preload(script(tmp_path, "import torch.nn\n")).modules


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fork": False}, "entry.fork is false"),
        ({"kind": "command"}, "the entry is a command"),
    ],
)
def test_nothing_is_imported_before_some_entries(tmp_path, change, reason):
    entry = Entry(**({"kind": "module", "target": "clusterddp.train.main", "working_dir": str(tmp_path)} | change))
    assert find_preload(entry).why_not == reason


def test_nothing_that_is_imported_for_all_reads_what_differs_between_ranks(tmp_path):
    """Of Python code. Going through all variables, as tqdm does for names of its own, is no reading of one."""
    modules = find_preload(Entry(kind="module", target="clusterddp.train.main", working_dir=str(tmp_path))).modules
    program = f"""
import importlib, os, sys
read, environ = set(), type(os.environ)
def recorded(method):
    def record(self, key, *default):
        if "_collections_abc" not in sys._getframe(1).f_code.co_filename:
            read.add(key)
        return method(self, key, *default)
    return record
environ.__getitem__, environ.__contains__ = recorded(environ.__getitem__), recorded(environ.__contains__)
environ.get = recorded(environ.get)
for module in {modules!r}:
    importlib.import_module(module)
print(sorted(read & set({DIFFERENT!r})), len(read) > 5)
"""
    environ = os.environ | dict.fromkeys(DIFFERENT, "7")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout == "[] True\n"
