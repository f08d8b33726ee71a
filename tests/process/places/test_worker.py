"""`clusterddp worker` under the launchers themselves: torchrun, both mpiruns, and by hand, on this machine."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.lost_children import KINDS, LostChildren
from tests.support.worker_ranks import Place, demand, meeting, wait_for, worker

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
UNDER_TORCHRUN = [*TORCHRUN, "-m", "clusterddp", "worker", "job.yaml"]
OPEN_MPI = ["--oversubscribe", "-n", "2"]
FAIL = "import os, sys\nif os.environ['RANK'] == '1':\n    raise ValueError('no such thing')\n"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path).write()


def test_ranks_of_open_mpi_find_their_places(place: Place) -> None:
    done = place.run(demand("mpirun.openmpi"), *OPEN_MPI, *worker())
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert place.values("RANK") == place.values("LOCAL_RANK") == ["0", "1"]
    assert place.values("LOCAL_WORLD_SIZE") == ["2", "2"]


def test_ranks_of_mpich_find_their_places(place: Place) -> None:
    done = place.run(demand("mpirun.mpich"), "-n", "2", *worker())
    assert done.returncode == 0, done.stderr
    assert place.values("RANK") == place.values("LOCAL_RANK") == ["0", "1"]


def test_a_wrapper_around_a_rank_of_mpich_does_not_part_it_from_the_others(place: Place) -> None:
    wrapped = ["sh", "-c", '"$@"; exit $?', "sh", *worker()]
    assert place.run(demand("mpirun.mpich"), "-n", "2", *wrapped).returncode == 0
    assert place.status()["state"] == "COMPLETED"


def test_ranks_of_torchrun_find_their_places(place: Place) -> None:
    done = place.run(*UNDER_TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert place.values("RANK") == ["0", "1"]


def test_ranks_started_by_hand_count_themselves_on_their_host(place: Place) -> None:
    assert [ended.code for ended in place.by_hand([1, 0], 2)] == [0, 0]
    assert place.values("LOCAL_RANK") == ["0", "1"]
    assert place.values("GROUP_WORLD_SIZE") == ["1", "1"]


def test_kubeflows_variables_make_each_pod_a_rank(place: Place) -> None:
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", **{f"PET_{k}": v for k, v in meeting(1).items()}}
    ended = wait_for([place.start(*worker(), PET_NODE_RANK=str(rank), **variables) for rank in (0, 1)])
    assert [each.code for each in ended] == [0, 0], ended[0].err
    assert place.values("RANK") == ["0", "1"]


def test_without_a_launcher_there_is_one_rank(place: Place) -> None:
    assert place.run(*worker()).returncode == 0
    assert place.values("WORLD_SIZE") == ["1"]


def test_without_a_launcher_a_machine_of_the_hosts_starts_its_ranks(tmp_path: Path) -> None:
    place = Place(tmp_path).write(more="ssh: {hosts: [127.0.0.1]}\nresources: {procs_per_node: 2}\ndevice: cpu")
    done = place.run(*worker())
    assert done.returncode == 0, done.stderr
    assert place.values("RANK") == place.values("LOCAL_RANK") == ["0", "1"]
    status = place.status()
    assert (status["state"], status["launcher"]) == ("COMPLETED", "worker")


def test_the_place_of_a_machine_can_be_named(tmp_path: Path) -> None:
    place = Place(tmp_path).write(more="ssh: {hosts: [127.0.0.1, 127.0.0.2]}\ndevice: cpu")
    ended = wait_for([place.start(*worker("--node-rank", str(number))) for number in (1, 0)])
    assert [each.code for each in ended] == [0, 0], ended
    assert place.values("GROUP_RANK") == ["0", "1"]
    done = place.run(*worker("--node-rank", "2"))
    assert (done.returncode, "the spec has nodes 0 to 1" in done.stderr) == (2, True)


def test_a_rank_of_a_launcher_has_its_place_from_the_launcher(place: Place) -> None:
    (ended,) = place.by_hand([0], 2, "--node-rank", "0")
    assert (ended.code, "--node-rank is for machines of ssh.hosts" in ended.err) == (2, True)


def test_the_process_that_the_launcher_started_becomes_the_rank(place: Place) -> None:
    process = place.start(*worker())
    wait_for([process])
    assert place.reports()[0]["pid"] == process.pid


def test_torch_is_not_imported_before_the_rank_is_known_to_have_a_gang(place: Place) -> None:
    place.run(*worker())
    assert place.reports()[0]["torch"] is False


def test_variables_that_are_set_stay_as_they_are(place: Place) -> None:
    place.by_hand([0, 1], 2, GLOO_SOCKET_IFNAME="lo0", **meeting(3))
    assert place.values("interface") == ["lo0", "lo0"]


def test_all_ranks_have_one_run_named_after_the_spec(place: Place) -> None:
    place.by_hand([0, 1], 2, **meeting(4))
    assert place.values("run") == [place.only_run.name] * 2
    assert place.only_run.name.startswith("job-")


def test_the_same_command_again_is_another_run(place: Place) -> None:
    first = place.by_hand([0, 1], 2, **meeting(5)) and place.only_run.name
    place.by_hand([0, 1], 2, **meeting(5))
    assert place.values("run") == [f"{first}-2"] * 2


def test_resume_goes_on_with_the_same_run(place: Place) -> None:
    (place.path / "entry.py").write_text("import sys; sys.exit(3)\n")
    place.by_hand([0, 1], 2, **meeting(6))
    name = place.only_run.name
    place.write()
    place.by_hand([0, 1], 2, "--resume", name, **meeting(6))
    assert [(report["run"], report["attempt"]) for report in place.reports()] == [(name, "1")] * 2


def test_torchruns_restart_is_the_next_attempt_of_the_same_run(tmp_path: Path) -> None:
    place = Place(tmp_path).write("import os, sys\nsys.exit(int(os.environ['CLUSTERDDP_ATTEMPT'] == '0'))\n")
    done = place.run(*TORCHRUN, "--max-restarts", "1", "-m", "clusterddp", "worker", "job.yaml")
    assert done.returncode == 0, done.stderr
    status = place.status()
    assert (status["state"], status["attempt"]) == ("COMPLETED", 1)


def test_status_shows_every_rank_of_a_run_that_is_over(place: Place) -> None:
    place.by_hand([0, 1], 2, **meeting(7))
    status = place.status()
    assert (status["state"], status["launcher"]) == ("COMPLETED", "none")
    assert [(rank["state"], rank["exit_code"]) for rank in status["ranks"]] == [("COMPLETED", 0)] * 2


def test_status_names_the_rank_that_failed_and_its_exception(tmp_path: Path) -> None:
    place = Place(tmp_path).write(FAIL)
    place.by_hand([0, 1], 2, **meeting(8))
    cause = place.status()["root_cause"]
    assert (cause["rank"], cause["exit_code"]) == (1, 1)
    assert "ValueError: no such thing" in cause["error"]


def test_a_rank_that_is_killed_is_the_cause(tmp_path: Path) -> None:
    code = "import os\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\nraise SystemExit(4)\n"
    place = Place(tmp_path).write(code)
    place.by_hand([0, 1], 2, **meeting(9))
    status = place.status()
    assert (status["state"], status["root_cause"]["rank"]) == ("FAILED", 1)


def test_cancel_kills_the_ranks_on_this_host(tmp_path: Path) -> None:
    place = Place(tmp_path).write("print('here', flush=True)\nimport time\ntime.sleep(600)\n")
    processes = [
        place.start(*worker(), RANK=str(rank), WORLD_SIZE="2", **meeting(10), PYTHONUNBUFFERED="1") for rank in (0, 1)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    assert place.clusterddp("cancel", "@last").returncode == 0
    assert [ended.code for ended in wait_for(processes)] == [-signal.SIGKILL] * 2
    assert place.status()["state"] == "CANCELLED"


def test_cancel_kills_what_a_rank_has_started_without_its_environment(tmp_path: Path) -> None:
    children = LostChildren()
    place = Place(tmp_path).write(f"{children.program}\nprint('here', flush=True)\nimport time\ntime.sleep(600)\n")
    process = place.start(*worker(), PYTHONUNBUFFERED="1")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(children.alive()) == KINDS
        place.clusterddp("cancel", "@last")
        assert children.alive() == []
    finally:
        children.end()
        process.kill()
        process.wait()


def test_resume_says_that_the_launcher_has_to_start_it(place: Place) -> None:
    (place.path / "entry.py").write_text("raise SystemExit(2)\n")
    place.run(*worker())
    done = place.clusterddp("resume", "@last")
    assert done.returncode == 2
    assert "worker SPEC --resume" in done.stderr


def test_a_rank_of_a_run_is_no_place_for_a_worker(place: Place) -> None:
    done = place.run(*worker(), CLUSTERDDP_RUN="brisk-otter-3")
    assert (done.returncode, "brisk-otter-3" in done.stderr) == (2, True)


def test_backend_mpi_is_refused_with_the_reason(place: Place) -> None:
    done = place.run(*worker("network.backend=mpi"))
    assert done.returncode == 2
    assert "not in PyTorch's wheels" in done.stderr


def test_the_spec_may_name_the_port(place: Place) -> None:
    port = meeting(11)["MASTER_PORT"]
    place.run(demand("mpirun.openmpi"), *OPEN_MPI, *worker(f"network.master_port={port}"))
    assert place.values("MASTER_PORT") == [port, port]


def test_a_port_in_the_spec_that_is_not_the_launchers_is_an_error(place: Place) -> None:
    done = place.run(
        *worker("network.master_port=12345"), RANK="0", WORLD_SIZE="2", MASTER_ADDR="gpu01", MASTER_PORT="12346"
    )
    assert done.returncode == 2
    assert "MASTER_PORT is 12346 and network.master_port is 12345" in done.stderr


def test_a_run_that_another_launcher_started_is_listed(place: Place) -> None:
    place.run(*worker())
    assert f"{place.only_run.name}  COMPLETED" in place.clusterddp("list").stdout


def test_logs_say_where_the_output_went(place: Place) -> None:
    place.by_hand([0, 1], 2, **meeting(12))
    assert "clusterddp worker" in place.clusterddp("logs").stderr


def test_gc_leaves_ranks_alone_that_another_launcher_has_started(tmp_path: Path) -> None:
    place = Place(tmp_path).write("print('here', flush=True)\nimport time\ntime.sleep(600)\n")
    process = place.start(*worker(), PYTHONUNBUFFERED="1")
    assert process.stdout is not None
    process.stdout.readline()
    try:
        place.clusterddp("gc", place.only_run.name, "--yes")
        os.kill(process.pid, 0)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
