"""Calling a function for many hosts at once: results, errors, and what becomes of results that nobody gets."""

from __future__ import annotations

import threading

import pytest

from clusterddp.errors import SshError
from clusterddp.places.ssh.connections import call_each
from tests.support.waiting import wait_until


def test_an_ssh_error_of_one_host_is_its_result() -> None:
    def connect(host: str) -> str:
        if host == "gpu02":
            raise SshError(host, "connect", "timed out")
        return f"session with {host}"

    results = call_each(connect, ["gpu02", "gpu01"])
    assert list(results) == ["gpu02", "gpu01"]
    assert results["gpu01"] == "session with gpu01"
    assert isinstance(results["gpu02"], SshError)


def test_after_an_unexpected_error_every_session_is_closed_the_late_ones_too() -> None:
    closed: list[str] = []
    late = threading.Event()

    def connect(host: str) -> str:
        if host == "broken":
            raise RuntimeError("a bug")
        if host == "late":
            late.wait(30)
        return host

    with pytest.raises(RuntimeError, match="a bug"):
        call_each(connect, ["late", "early", "broken"], closed.append)
    late.set()
    wait_until(lambda: sorted(closed) == ["early", "late"])
