"""Connections to many hosts at once: a result per host, a connection or why there is none."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from clusterddp.errors import SshError
from clusterddp.ssh.config import Destination
from clusterddp.ssh.connection import Connection
from clusterddp.ssh.keys import HostKey
from clusterddp.ssh.network import Network

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def connect_all(
    hosts: Iterable[str],
    *,
    environ: Mapping[str, str],
    pinned: Mapping[str, str] | None = None,
    at_once: int = 64,
    per_bastion: int = 8,
) -> dict[str, Connection | SshError]:
    """Connect to hosts, as `ssh HOST` would; whoever gets the connections closes them.

    `pinned`: host -> the key that it must have, `SHA256:...` or `TYPE BASE64`. `per_bastion`: so many at a time go
    through one host on the way, or to one sshd.
    """
    network = Network(environ, per_bastion)

    def reach(host: str) -> Connection | SshError:
        try:
            return network.connect(host, pinned=(pinned or {}).get(host))
        except SshError as error:
            return error

    with network:
        return _Fan(dict.fromkeys(hosts), reach, _close_if_open).results(at_once)


def scan_all(
    destinations: Iterable[Destination], *, environ: Mapping[str, str], at_once: int = 64, per_bastion: int = 8
) -> dict[Destination, HostKey | SshError]:
    """See which keys hosts show, whoever they are; the hosts on the way there have to be known.

    No host that is not known hears more than the handshake.
    """
    network = Network(environ, per_bastion)

    def scan(destination: Destination) -> HostKey | SshError:
        try:
            return network.scan(destination)
        except SshError as error:
            return error

    with network:
        return _Fan(dict.fromkeys(destinations), scan, lambda result: None).results(at_once)


class _Fan(Generic[_Item, _Result]):
    """Calls a function for every item, in threads that nobody has to wait for."""

    def __init__(
        self, items: Iterable[_Item], function: Callable[[_Item], _Result], undo: Callable[[_Result], object]
    ) -> None:
        self._order = list(items)
        self._function = function
        self._undo = undo
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Item, _Result] | BaseException] = queue.SimpleQueue()
        self._given_up = threading.Event()

    def results(self, at_once: int) -> dict[_Item, _Result]:
        """Return all results in the order of the items; when this is interrupted, those that are there are undone."""
        for item in self._order:
            self._waiting.put(item)
        for _ in range(min(at_once, len(self._order))):
            threading.Thread(target=self._work, daemon=True).start()
        results: dict[_Item, _Result] = {}
        try:
            while len(results) < len(self._order):
                done = self._done.get()
                if isinstance(done, BaseException):
                    raise done
                results[done[0]] = done[1]
        except BaseException:
            self._given_up.set()
            for result in results.values():
                self._undo(result)
            raise
        return {item: results[item] for item in self._order}

    def _work(self) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._given_up.is_set():
                item = self._waiting.get_nowait()
                try:
                    result = self._function(item)
                except BaseException as error:  # our own mistake: the thread that waits raises it
                    self._done.put(error)
                    return
                if self._given_up.is_set():
                    self._undo(result)
                self._done.put((item, result))


def _close_if_open(result: Connection | SshError) -> None:
    if isinstance(result, Connection):
        result.close()
