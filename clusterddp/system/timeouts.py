"""Default timeouts after which a host or a process counts as lost."""

from __future__ import annotations

HOST_SILENCE_S = 30.0
"""network.host_silence: longer than a spanning tree, the restart of a switch or the failover of a bond takes."""
HEARTBEAT_TIMEOUT_S = 60.0
"""network.heartbeat_timeout: longer than a process usually waits for a file server."""
