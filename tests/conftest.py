"""Fixtures that several test files share."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ssh_person import SshPerson, own_ssh_dir
from tests.support.ssh_place import SshPlace, ssh_place_on
from tests.testbed.plan import HEAD, RackPlan
from tests.testbed.rack import Rack, find_obstacle, running_rack

# A shell's background job ignores SIGINT and SIGQUIT, one under nohup SIGHUP, and so would all that tests start and end
# with them. What starts has no handler of its own, so a handler here gives it the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, lambda number, frame: None)

# Each of run_all's workers reads all test files: until that is done they keep what they compile, whatever
# PYTHONDONTWRITEBYTECODE says; what a test starts goes by the variable.
_WRITES_BYTECODE = not sys.dont_write_bytecode
sys.dont_write_bytecode = False
gc.disable()  # until all is imported

LONG = (
    "batch_scripts",
    "batch_script_faults",
    "sim_cuda",
    "train_loop",
    "launch_table",
    "train_forward",
    "sweep_local",
    "train_comm",
    "train_program",
    "node_gang",
    "entry_kinds",
    "cli_real",
    "launch_local",
    "launch_table_rack",
    "slurm_login",
    "outages",
    "slurm_stop",
    "slurm_show",
    "ssh_launch",
    "doctor_ssh",
    "ssh_home",
    "slurm_failures",
    "slurm_resume",
    "sweep_slurm",
    "ranks_meet",
    "slurm_losses",
    "ssh_kills",
    "ssh_gpus",
)
"""Files that take minutes: they begin first, so that no worker is left alone with one at the end (tests/run_all)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; within a file nothing changes."""
    order = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = not _WRITES_BYTECODE
    gc.freeze()  # what was imported stays: to visit it again and again takes a tenth of the unit tests' time
    gc.enable()


def demand_rack(*, accounting: bool) -> None:
    obstacle = find_obstacle(accounting=accounting)
    if obstacle and os.environ.get("CLUSTERDDP_TEST_RACK") == "required":
        pytest.fail(obstacle)
    if obstacle:
        pytest.skip(obstacle)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the key of the user's seal apart from that of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def no_bad_nodes() -> Iterator[None]:
    """Forget the nodes that a test has failed: other tests' clusters have nodes of the same names."""
    yield
    Path(os.environ["XDG_STATE_HOME"], "clusterddp", "nodes.json").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def needs_rack() -> None:
    """Skip, with the reason, where no rack can run; fail where CLUSTERDDP_TEST_RACK says that it must."""
    demand_rack(accounting=False)


@pytest.fixture(scope="session")
def needs_rack_accounting() -> None:
    """Skip or fail likewise where no rack with slurmdbd can run."""
    demand_rack(accounting=True)


@pytest.fixture(scope="session")
def shared_rack(needs_rack: None) -> Iterator[Rack]:
    with running_rack() as rack:
        yield rack


@pytest.fixture(scope="module")
def rack(shared_rack: Rack) -> Rack:
    """A rack of four nodes, idle, for tests that leave it as they found it; the others start their own."""
    shared_rack.run(
        HEAD, ["sh", "-c", "squeue -h -o %A | xargs -r scancel; rm -f ~/.local/state/clusterddp/nodes.json"]
    )
    shared_rack.await_idle()
    return shared_rack


@pytest.fixture(scope="module")
def hosts(needs_rack: None) -> Iterator[Rack]:
    """Three hosts that are reached by SSH."""
    with running_rack(RackPlan(nodes=["node1", "node2", "node3"], gpus_per_host=0)) as rack:
        yield rack


@pytest.fixture
def person(hosts: Rack) -> Iterator[SshPerson]:
    """A user on their head, with a ~/.ssh of the test's own."""
    with own_ssh_dir(hosts) as person:
        yield person


@pytest.fixture(scope="session")
def lan(needs_rack: None) -> Iterator[Rack]:
    """Three hosts that share nothing and have sshd and torch, for tests that leave them as they found them."""
    with running_rack(RackPlan(nodes=["node1", "node2", "node3"], private_hosts=True, slurm=False)) as rack:
        yield rack


@pytest.fixture
def ssh_place(lan: Rack) -> Iterator[SshPlace]:
    """A directory on the laptop of `lan` to submit from; what was submitted is gone at the end."""
    with ssh_place_on(lan) as place:
        yield place
