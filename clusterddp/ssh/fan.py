"""Calls a function for many hosts at once, in daemon threads: an interrupt does not wait for a host that hangs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

AT_ONCE = 64
"""How many hosts are asked at once: they may share a file server, a bastion or a processor."""
EACH_S = 0.15
"""What each of many hosts adds to their timeout, in seconds: a session takes this machine that long, too."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Fan(Generic[_Item, _Result]):
    """Calls a function for every item, in daemon threads; `undo` closes a result that no caller gets."""

    def __init__(
        self,
        items: Iterable[_Item],
        function: Callable[[_Item], _Result],
        undo: Callable[[_Result], object] = lambda result: None,
    ) -> None:
        self._order = list(items)
        self._function = function
        self._undo = undo
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Item, _Result] | BaseException] = queue.SimpleQueue()
        self._given_up = threading.Event()

    def results(self, at_once: int) -> dict[_Item, _Result]:
        """Return all results in the order of the items; an interrupt undoes the results so far."""
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
                except BaseException as error:  # an unexpected error: the thread that waits raises it
                    self._done.put(error)
                    return
                if self._given_up.is_set():
                    self._undo(result)
                self._done.put((item, result))
