"""How the end of a rank is described, and which of several failures is the cause."""

import dataclasses
import json
import os
import resource

import pytest

from clusterddp.node.attempt import (
    CASCADE,
    CERTAIN,
    CONNECTION,
    OWN,
    SETTLE_OWN_S,
    SETTLE_S,
    SETTLE_SPAWNED_S,
    Attempt,
    read_rank_end,
)
from clusterddp.node.head import Ending
from clusterddp.ranks.environment import spell_ranks
from clusterddp.run.directory import RunDir
from clusterddp.run.gang import Entry, Gang, Node
from clusterddp.run.record import RankEnd
from clusterddp.system.units import format_bytes
from tests.support.handmade_runs import make_gang

GLOO = (
    "RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12003. This is typically"
)
STORE = "torch.distributed.DistStoreError: Timed out after 21 seconds waiting for clients. 3/4 clients joined."


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), (range(8), "ranks 0-7"), ([0, 1, 2, 6], "ranks 0-2, 6"), ([5, 4], "ranks 4-5")],
)
def test_ranks_are_spelled_as_ranges(ranks, text):
    assert spell_ranks(ranks) == text


def make_attempt(tmp_path):
    attempt = RunDir(tmp_path).attempt(0)
    attempt.ranks.mkdir(parents=True)
    attempt.logs.mkdir()
    return attempt


def write_error(attempt, message, traceback="Traceback ..."):
    content = {"message": {"message": message, "extraInfo": {"py_callstack": traceback}}}
    attempt.error_file(1).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("message", "weight"),
    [
        ("ValueError: no", OWN),
        ("torch.OutOfMemoryError: CUDA out of memory.", OWN),
        (GLOO, CASCADE),
        (STORE, CASCADE),
        ("torch.distributed.DistStoreError: wait timeout after 20000ms, keys: /default_pg/0//cpu//0/0", CASCADE),
        ("torch.distributed.DistBackendError: NCCL error, ncclRemoteError: A call failed possibly due to", CASCADE),
        ("RuntimeError: Read error [127.0.0.1]:61857: Connection reset by peer", CONNECTION),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", CONNECTION),
        ("BrokenPipeError: [Errno 32] Broken pipe", CONNECTION),
    ],
)
def test_an_exception_is_weighed_by_its_possible_causes(tmp_path, message, weight):
    attempt = make_attempt(tmp_path)
    write_error(attempt, message)
    assert read_rank_end(attempt, 1, 1, host="a", on_order=False).weight == weight


def test_an_exception_that_was_raised_from_a_lost_connection_weighs_as_one(tmp_path):
    attempt = make_attempt(tmp_path)
    write_error(
        attempt, "TrainingError: step 7", f"{GLOO}\n\nThe above exception was the direct cause\n\nTrainingError"
    )
    assert read_rank_end(attempt, 1, 1, host="a", on_order=False).weight == CASCADE


def test_a_signal_from_outside_is_certain_whatever_the_log_says(tmp_path):
    attempt = make_attempt(tmp_path)
    attempt.stderr(1).write_text(GLOO)
    assert read_rank_end(attempt, 1, -9, host="a", on_order=False).weight == CERTAIN


def test_an_abort_after_a_watchdog_message_is_a_cascade_and_any_other_is_certain(tmp_path):
    attempt = make_attempt(tmp_path)
    attempt.stderr(1).write_text("terminate called without an active exception\n")
    end = read_rank_end(attempt, 1, -6, host="a", on_order=False)
    assert (end.weight, end.error) == (CERTAIN, "terminate called without an active exception")
    attempt.stderr(1).write_text("[PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(...)\n")
    assert read_rank_end(attempt, 1, -6, host="a", on_order=False).weight == CASCADE


HYDRA = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
TRACEBACK = """Traceback (most recent call last):
  File "/home/ana/app.py", line 3, in main
    raise ValueError("the learning rate is negative")
ValueError: the learning rate is negative
"""
CALLED = """Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 958, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/opt/venv/bin/python', 'app.py']' returned non-zero exit status 1.
"""
OVERRIDE = """Could not override 'b'.
To append to your config use +b=2
Key 'b' is not in struct
    full_key: b
    object_type=dict
"""
LEAKED = """/opt/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 \
leaked semaphore objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""
NO_DESTROY = (
    "[rank0]:[W1127 05:10:11.1 ProcessGroupNCCL.cpp:1476] Warning: WARNING: destroy_process_group() was not called\n"
)


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (f"Error executing job with overrides: []\n{TRACEBACK}{HYDRA}", "ValueError: the learning rate is negative"),
        (f"starts\n\n{OVERRIDE}{HYDRA}", "Could not override 'b'."),
        (TRACEBACK + CALLED, "ValueError: the learning rate is negative"),
        (CALLED, CALLED.splitlines()[-1]),
        (f"{TRACEBACK}wandb: \nwandb: Find logs at: wandb/run-1/logs\n", "ValueError: the learning rate is negative"),
        (TRACEBACK + NO_DESTROY + LEAKED, "ValueError: the learning rate is negative"),
        (f"{TRACEBACK}no such label: cat\n", "no such label: cat"),
        (f"{TRACEBACK}{CALLED}tries without it\nno such label: cat\n", "no such label: cat"),
        (HYDRA, HYDRA.strip()),
    ],
    ids=[
        "hydra",
        "hydra's override",
        "accelerate",
        "accelerate alone",
        "wandb",
        "warnings",
        "its own",
        "handled",
        "only advice",
    ],
)
def test_the_cause_is_what_failed_and_not_what_a_program_prints_after_it(tmp_path, stderr, line):
    attempt = make_attempt(tmp_path)
    attempt.stderr(1).write_text(stderr)
    end = read_rank_end(attempt, 1, 1, host="a", on_order=False)
    assert end.spell("rank 1") == f"rank 1 exited with code 1; the last line of its stderr: {line}"


TORCHRUNS = """Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
app.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 44)
  error_file: <N/A>
============================================================
"""


def test_the_cause_in_the_output_of_torchrun_is_the_exception_of_its_rank(tmp_path):
    attempt = make_attempt(tmp_path)
    attempt.stderr(1).write_text("".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()) + TORCHRUNS)
    end = read_rank_end(attempt, 1, 1, host="a", on_order=False)
    assert (end.last_line, end.traceback) == (TRACEBACK.splitlines()[-1], TRACEBACK.rstrip("\n"))


def test_only_a_rank_that_the_kernel_may_have_killed_is_said_to_be_short_of_memory(tmp_path):
    attempt, as_one_more_kill = make_attempt(tmp_path), -1
    write_error(attempt, "ValueError: no")
    ends = [
        read_rank_end(attempt, 1, code, host="a", on_order=on_order, oom_kills=as_one_more_kill).error
        for code, on_order in [(1, False), (-9, True), (-9, False)]
    ]
    assert ends[:2] == ["ValueError: no"] * 2
    assert "the kernel has killed a process" in ends[2]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"message": null}', '{"message": {"message": 1, "extraInfo": 7}}', "\xff" * 9]
)
def test_a_damaged_error_file_does_not_hide_the_exit_code(tmp_path, content):
    attempt = make_attempt(tmp_path)
    attempt.error_file(1).write_text(content)
    assert read_rank_end(attempt, 1, 3, host="a", on_order=False).exit_code == 3


def make_watch(tmp_path, *, spawns=()):
    entry = Entry(kind="script", target="x.py", working_dir="/", spawns=spawns)
    nodes = tuple(Node(node_rank=node, host=f"host{node}", ranks=(2 * node, 2 * node + 1)) for node in range(2))
    gang = Gang(
        run="r", token="t", nodes=nodes, entry=entry, threads_per_rank=1, backend="gloo", master_addr="127.0.0.1"
    )
    attempt = Attempt(RunDir(tmp_path), gang, 0)
    attempt.begun = 0.0
    return attempt


@pytest.mark.parametrize(("on_cpu", "seconds"), [(True, 10.0), (False, 34.0)])
def test_processes_with_gpus_have_longer_until_they_cannot_be_killed(on_cpu, seconds):
    ending = Ending(dataclasses.replace(make_gang(2), on_cpu=on_cpu), {1}, 100.0)
    assert not ending.is_over(100.0 + seconds - 0.1, waits=False)
    assert ending.is_over(100.0 + seconds, waits=False)
    ending.confirm(1, [])
    assert ending.all_gone


def failed(rank, weight, error="some error", **facts):
    return RankEnd(rank=rank, host=f"host{rank // 2}", exit_code=1, error=error, weight=weight, **facts)


def test_a_signal_decides_at_once_and_a_connection_loss_waits(tmp_path):
    for weight, wait in [(CERTAIN, 0.0), (OWN, SETTLE_OWN_S), (CONNECTION, SETTLE_S), (CASCADE, SETTLE_S)]:
        attempt = make_watch(tmp_path)
        attempt.rank_ended(failed(0, weight), 100.0)
        assert not attempt.is_over(100.0 + wait - 0.01)
        assert attempt.is_over(100.0 + wait)


def test_a_program_that_starts_its_ranks_itself_has_longer_to_report_which_failed(tmp_path):
    for weight, wait in [(OWN, SETTLE_OWN_S), (CONNECTION, SETTLE_SPAWNED_S), (CASCADE, SETTLE_SPAWNED_S)]:
        attempt = make_watch(tmp_path, spawns=(2, 2))
        attempt.rank_ended(failed(0, weight), 100.0)
        assert not attempt.is_over(100.0 + wait - 0.01)
        assert attempt.is_over(100.0 + wait)


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ([CASCADE, CASCADE, OWN, CASCADE], 2),
        ([OWN, CASCADE, CERTAIN, OWN], 2),
        ([CASCADE, CONNECTION, CASCADE, CASCADE], 1),
        ([CASCADE, CASCADE, CASCADE, CASCADE], 0),
        ([OWN, OWN, CASCADE, CASCADE], 0),
    ],
)
def test_the_weightiest_failure_is_the_cause_and_of_equals_the_first(tmp_path, weights, cause):
    attempt = make_watch(tmp_path)
    for rank, weight in enumerate(weights):
        attempt.rank_ended(failed(rank, weight), 0.0)
    assert attempt.verdict(stop_confirmed=False).root_cause.rank == cause


def test_a_rank_that_was_cleaning_up_after_its_own_exception_is_still_the_cause(tmp_path):
    attempt = make_watch(tmp_path)
    attempt.rank_ended(failed(0, CASCADE), 0.0)
    attempt.decide()
    attempt.rank_ended(failed(3, OWN, "ValueError: mine", on_order=True), 0.7)
    assert attempt.verdict(stop_confirmed=False).root_cause.rank == 3


def test_once_it_is_decided_a_later_failure_changes_nothing(tmp_path):
    attempt = make_watch(tmp_path)
    attempt.rank_ended(failed(2, OWN), 0.0)
    attempt.decide()
    attempt.rank_ended(failed(1, CERTAIN), 0.2)
    assert attempt.verdict(stop_confirmed=False).root_cause.rank == 2


@pytest.mark.parametrize(
    "end",
    [
        RankEnd(rank=3, host="host1", exit_code=143, signal="SIGTERM", weight=CERTAIN, on_order=True),
        RankEnd(rank=3, host="host1", exit_code=1, error="SystemExit: terminated", weight=OWN, on_order=True),
        RankEnd(rank=3, host="host1", exit_code=1, error="KeyboardInterrupt", weight=OWN, on_order=True),
        RankEnd(rank=3, host="host1", exit_code=5, weight=OWN, on_order=True),
    ],
)
def test_a_rank_that_ended_on_order_is_never_the_cause(tmp_path, end):
    attempt = make_watch(tmp_path)
    attempt.rank_ended(failed(0, CASCADE), 0.0)
    attempt.decide()
    attempt.rank_ended(end, 0.7)
    assert attempt.verdict(stop_confirmed=False).root_cause.rank == 0


@pytest.mark.parametrize("by_error_file", [True, False])
def test_an_error_of_a_limit_has_the_limit_of_this_host(tmp_path, by_error_file):
    attempt = make_attempt(tmp_path)
    shm = os.statvfs("/dev/shm")
    files, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    for error, limit in {
        "OSError: [Errno 24] Too many open files: '/data/7.jpg'": f" (the limit on this host is {files} for a process)",
        "RuntimeError: unable to open shared memory object </torch_2> in read-write mode: Too many open files (24)": (
            f" (the limit on this host is {files} for a process)"
        ),
        "RuntimeError: can't start new thread": (
            f" (the limit on this host is {processes} processes and threads of a user)"
            if processes != resource.RLIM_INFINITY
            else ""
        ),
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)": (
            f" (/dev/shm of this host has {format_bytes(shm.f_blocks * shm.f_frsize)})"
        ),
        "ValueError: no": "",
    }.items():
        if by_error_file:
            write_error(attempt, error)
        else:
            attempt.stderr(1).write_text(f"{error}\n")
        assert read_rank_end(attempt, 1, 1, host="a", on_order=False).spell("rank 1").endswith(error + limit)


def test_a_rank_that_a_bus_error_has_killed_has_the_size_of_the_shared_memory(tmp_path):
    end = read_rank_end(make_attempt(tmp_path), 1, -7, host="a", on_order=False)
    assert end.spell("rank 1").startswith("rank 1 was killed by SIGBUS (/dev/shm of this host has ")
