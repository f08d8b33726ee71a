"""Which hosts share their storage, by the marks that each of them sees."""

from __future__ import annotations

import pytest

from clusterddp.remote.uploader import _join


@pytest.mark.parametrize(
    ("sees", "groups"),
    [
        ({"a": {"a"}, "b": {"b"}}, (("a",), ("b",))),
        ({"a": {"a", "c"}, "b": {"b"}, "c": {"a", "c"}}, (("a", "c"), ("b",))),
        ({"a": {"a"}, "b": {"a", "b"}}, (("a", "b"),)),  # a file server may answer late
        ({"a": {"a"}, "b": {"a", "b"}, "c": {"b", "c"}}, (("a", "b", "c"),)),
        ({"a": set(), "b": set()}, (("a",), ("b",))),  # what cannot be marked is a host's own
    ],
)
def test_hosts_that_see_each_others_marks_share_their_storage(
    sees: dict[str, set[str]], groups: tuple[tuple[str, ...], ...]
) -> None:
    assert _join(sees) == groups
