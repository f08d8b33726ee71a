"""Host lists, and the place of a task in srun's variables: every name in order, every contradiction an error."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterddp.errors import ClusterddpError
from clusterddp.network.hostlist import compress, compress_counts, expand
from clusterddp.ranks.slurm_step import expand_counts, read_place

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("a,b,a", ["a", "b", "a"]),
        ("node[3,1-2]", ["node3", "node1", "node2"]),
        ("rack[1-2]node[3-4],login1", ["rack1node3", "rack1node4", "rack2node3", "rack2node4", "login1"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
        ("n[1-2].a.example", ["n1.a.example", "n2.a.example"]),
        ("[1-2]", ["1", "2"]),
        ("a, b", ["a", "b"]),
        ("", []),
    ],
)
def test_a_host_list_is_expanded_in_its_order(text, hosts):
    assert expand(text) == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node[1-", "column 7: a ']' is missing"),
        ("node1]", "column 6: a ']' too many"),
        ("node[[1]]", "column 6: a '[' too many"),
        ("a,,b", "column 3: a host name is missing"),
        ("node[1-]", "column 6: a number or a range of numbers is expected, not '1-'"),
        ("node[2,x]", "column 8: a number or a range of numbers is expected, not 'x'"),
        ("node[3-1]", "column 6: the range '3-1' runs backwards"),
        ("n[1-9][1-99999]", "column 8: these are more than 65,536 hosts"),
    ],
)
def test_what_is_no_host_list_is_refused_with_its_place(text, words):
    with pytest.raises(ClusterddpError) as refused:
        expand(text)
    assert refused.value.message == f"host list {text!r}, {words}"


NUMBERS = st.tuples(st.integers(0, 120), st.integers(0, 6), st.integers(1, 5))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["n", "rack-", "gpu.a"]), st.lists(NUMBERS, min_size=1, max_size=3))))
def test_what_is_written_as_ranges_is_read_as_the_same_hosts(parts):
    text, hosts = [], []
    for prefix, ranges in parts:
        items = []
        for first, more, width in ranges:
            items.append(f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}")
            hosts += [f"{prefix}{number:0{width}}" for number in range(first, first + more + 1)]
        text.append(f"{prefix}[{','.join(items)}]")
    assert expand(",".join(text)) == tuple(hosts)


@settings(deadline=None)
@given(st.text(alphabet="n1-[],x", max_size=12))
def test_any_text_is_expanded_or_refused(text):
    with contextlib.suppress(ClusterddpError):
        assert all(expand(text))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_counts_per_node_are_read_as_slurm_writes_them(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == tuple(count for count, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "-1", "999999(x999999)"])
def test_what_are_no_counts_is_refused(text):
    with pytest.raises(ClusterddpError, match="tasks per node"):
        expand_counts(text)


def test_a_task_reads_its_place_from_its_step():
    place = read_place(STEP)
    assert (place.rank, place.local_rank, place.node_rank, place.host) == (2, 0, 1, "node2")
    assert (place.ranks, place.world_size, place.restart_count) == (((0, 1), (2,)), 3, 0)


def test_uneven_tasks_are_numbered_in_blocks():
    uneven = {"SLURM_STEP_NODELIST": "node[1-4]", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7"}
    place = read_place(STEP | uneven | {"SLURM_PROCID": "6", "SLURM_NODEID": "3"})
    assert place.ranks == ((0, 1), (2, 3), (4, 5), (6,))


def test_the_step_counts_before_the_job():
    job = {"SLURM_JOB_NODELIST": "node[1-9]", "SLURM_TASKS_PER_NODE": "8(x9)", "SLURM_NTASKS": "72"}
    assert read_place(STEP | job) == read_place(STEP)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "3 tasks on the nodes, 4 in the step"),
        ({"SLURM_STEP_NODELIST": "node1"}, "the step's 1 hosts are node1, but tasks per node are given for 2"),
        ({"SLURM_NODEID": "2"}, "node 2 of a step with 2 hosts"),
        ({"SLURM_PROCID": "1"}, "task 1 is number 0 on node 1, whose tasks are 2"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({"SLURM_LOCALID": "first"}, "SLURM_LOCALID is 'first', a number is expected"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changed, words):
    with pytest.raises(ClusterddpError, match=words):
        read_place(STEP | changed)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("a1,a2,a3,b", "a[1-3],b"),
        ("node08,node09,node10,node12", "node[08-10,12]"),
        ("n9,n10", "n[9,10]"),
        ("login,login,a1", "login,login,a1"),
        ("127.0.0.1,127.0.0.2", "127.0.0.[1-2]"),
        ("", ""),
    ],
)
def test_a_compressed_host_list_names_the_same_hosts(hosts: str, text: str) -> None:
    assert (compress(expand(hosts)), expand(text)) == (text, expand(hosts))


def test_equal_counts_of_neighbours_are_written_once() -> None:
    assert compress_counts([2, 2, 2, 1, 2]) == "2(x3),1,2"
