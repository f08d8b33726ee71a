"""Rows that a program or a host wrote with a value of another type are passed over."""

from __future__ import annotations

from clusterddp.view.events import warn_of_unsent
from clusterddp.view.progress import progress_of


def test_a_row_whose_kind_is_a_list_counts_for_nothing() -> None:
    progress = progress_of([{"kind": "train", "attempt": 0, "loss": 2.0}, {"kind": [], "attempt": 0, "loss": 1.0}])
    assert progress is not None
    assert progress.losses == (2.0,)


def test_an_event_whose_name_is_a_list_is_no_message() -> None:
    assert warn_of_unsent([{"event": [[]], "attempt": 0}]) == ""
