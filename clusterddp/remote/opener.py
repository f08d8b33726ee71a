"""Opens sessions with hosts one by one, again and again, over hosts on the way that all of them share."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from clusterddp.errors import SshError
from clusterddp.remote.package import package
from clusterddp.ssh.network import Network
from clusterddp.ssh.session import HostAccess, Session, start_session

_PER_BASTION = 8


class Opener:
    """Opens a session with a host; from any thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._network = Network(environ, _PER_BASTION)

    def __call__(self, access: HostAccess) -> Session:
        """Speak to a host.

        Raises: SshError.
        """
        network = self._network
        try:
            connection = network.connect(access.host, pinned=access.host_key)
        except SshError:
            self._forget(network)
            raise
        with self._lock:  # it is made once, and not by every thread for itself
            sent = package()
        session = start_session(connection, access, sent)
        if isinstance(session, SshError):
            raise session
        return session

    def _forget(self, network: Network) -> None:
        """Begin anew: a network remembers which host on the way could not be reached."""
        with self._lock:
            if self._network is not network:
                return
            self._network = Network(self._environ, _PER_BASTION)
        network.__exit__()
