"""Gives torch's store on rank 0 the socket that already listens at the master port, so that it binds none.

Rank 0 inherits that socket (LISTENER_FD), so a process of this run always listens at the port, and no other user can
bind it (network/port.py). torch's rendezvous (env://, tcp://) takes no descriptor, but every store that Python code
makes is a TCPStore, which takes one (`master_listen_fd`): its constructor is wrapped once torch is imported. A Python
socket that the program itself binds to the port becomes the listener, too.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from clusterddp.ranks.environment import LISTENER_FD

_MODULE = "torch.distributed"
_TAKES_FD = 3
"""The position of `master_listen_fd` among the arguments after `is_master`."""


def give_listener_to_torch() -> None:
    """Let this process's store at the master port use the socket of LISTENER_FD, if that is set.

    Children of this process get neither the variable nor, after an exec, the socket.
    """
    descriptor = os.environ.pop(LISTENER_FD, None)
    if descriptor is None:
        return
    os.set_inheritable(int(descriptor), False)
    listener = socket.socket(fileno=int(descriptor))
    _give_to_binds(listener)
    if _MODULE in sys.modules:  # forked from a process that has imported it
        _wrap_store(sys.modules[_MODULE], listener)
    else:
        sys.meta_path.insert(0, _AfterImport(listener))


def _give_to_binds(listener: socket.socket) -> None:
    """Make each TCP socket that is bound to the listener's port a duplicate of it: it listens on all addresses."""
    original, ours = socket.socket.bind, listener.getsockname()[1]

    @functools.wraps(original)
    def bind(self: socket.socket, address: Any, /) -> None:
        of_tcp = self.type == socket.SOCK_STREAM and self.family in (socket.AF_INET, socket.AF_INET6)
        if of_tcp and isinstance(address, tuple) and address[1:2] == (ours,):
            os.dup2(listener.fileno(), self.fileno(), inheritable=False)
        else:
            original(self, address)

    socket.socket.bind = bind  # type: ignore[assignment,method-assign]


class _AfterImport:
    """Finds torch.distributed as the other finders do, and wraps its store once it is loaded."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                _wrap_store(module, self._listener)

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap_store(module: ModuleType, listener: socket.socket) -> None:
    """Make each store that serves at the listener's port take a duplicate of the socket.

    A duplicate, because a program may destroy its group and make another one at the same port.
    """
    store = getattr(module, "TCPStore", None)
    if store is None:  # this torch was built without torch.distributed
        return
    original, ours = store.__init__, listener.getsockname()[1]

    @functools.wraps(original)
    def take_listener(
        self: Any, host_name: str, port: int, world_size: Any = None, is_master: bool = False, *rest: Any, **named: Any
    ) -> None:
        if is_master and port == ours and len(rest) <= _TAKES_FD and named.get("master_listen_fd") is None:
            named["master_listen_fd"] = os.dup(listener.fileno())
        original(self, host_name, port, world_size, is_master, *rest, **named)

    store.__init__ = take_listener
