"""The order of a supervisor: written in one place, read in one place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.run.supervisors import JobOrder, Link, SupervisorOrder
from tests.support.handmade_runs import make_gang

GANG = make_gang(nodes=2)


def order(**changes: object) -> SupervisorOrder:
    """Return an order with every field set to something that is no default."""
    fields = {
        "run_dir": Path("/runs/a"),
        "gang": GANG,
        "node_rank": GANG.nodes[-1].node_rank,
        "attempt": 3,
        "link": Link(host="10.0.0.1", port=4000),
        "parent_bound": True,
        "over_ssh": True,
        "hold": (7, 8),
        "tasks": 9,
        "job": JobOrder(job_id="12", restart_count=1, used_restarts=2, job_tag="tag", heads=("n1",)),
    }
    return SupervisorOrder(**(fields | changes))


def test_an_order_survives_its_way_through_a_pipe() -> None:
    sent = order()
    assert SupervisorOrder.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_an_order_for_a_node_that_the_gang_lacks_is_refused() -> None:
    data = order().to_json() | {"node_rank": 99}
    with pytest.raises(ValueError, match="node_rank is 99: the gang has no such node"):
        SupervisorOrder.from_json(data)


def test_an_order_of_another_shape_is_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(ValueError, match=r"order\.attempt is 'one'"):
        SupervisorOrder.from_json(order().to_json() | {"attempt": "one"})
