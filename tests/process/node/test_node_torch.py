"""Real torch ranks over gloo: the cause is right although every other rank fails as well, and within milliseconds."""

import time

import pytest

from tests.support.gang_runs import running
from tests.support.waiting import PATIENCE

pytest.importorskip("torch")

# A tight loop: whichever rank ends, the others fail inside all_reduce at once.
LOOP = """
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
ones, steps = torch.ones(1000), 0
up()
while True:
    torch.distributed.all_reduce(ones)
    steps += 1
    if rank == VICTIM and steps == 300:
        FAILURE
"""
FAILURES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank {rank} on {host} was killed by SIGKILL"),
    "raised": ("raise ValueError('a bad batch')", "rank {rank} on {host}: ValueError: a bad batch"),
    "left": ("os._exit(7)", "rank {rank} on {host} exited with code 7"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "victim"), [("killed", 3), ("raised", 1), ("left", 0)])
def test_the_cause_is_found_among_the_connection_losses_that_follow_from_it(tmp_path, failure, victim):
    statement, error = FAILURES[failure]
    program = LOOP.replace("VICTIM", str(victim)).replace("FAILURE", statement)
    with running(tmp_path, program) as gang:
        gang.await_end(timeout_s=120)
        cause = gang.end().root_cause
        assert cause.rank == victim
        assert cause.error == error.format(rank=victim, host=f"host{victim // 2}")


@pytest.mark.slow
def test_torch_ranks_find_each_other_by_the_variables(tmp_path):
    program = """
import torch, torch.distributed
torch.distributed.init_process_group()
total = torch.tensor(float(rank))
torch.distributed.all_reduce(total)
print(int(total))
torch.distributed.destroy_process_group()
"""
    with running(tmp_path, program) as gang:
        start = time.monotonic()
        assert gang.await_end(timeout_s=120) == [0, 0], gang.end()
        assert [gang.attempt().stdout(rank).read_text() for rank in range(4)] == ["6\n"] * 4
        assert time.monotonic() - start < PATIENCE * 60


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 4], ids=["forked", "by itself"])
def test_a_model_that_outlives_its_group_does_not_hang_a_rank(tmp_path, nodes):
    """Its end is the group's, which joins a thread that may wait for the interpreter: all ranks hung by the third."""
    program = """
import torch, torch.distributed
def train(number):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{run_dir}/meet-{number}", rank=rank, world_size=4
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 1)).sum().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
assert not hasattr(torch.distributed.destroy_process_group.__wrapped__, "__wrapped__"), "it waits twice"
for number in range(40):
    train(number)
"""
    with running(tmp_path, program, nodes=nodes, ranks_per_node=4 // nodes) as gang:
        assert gang.await_end(timeout_s=120) == [0] * nodes
