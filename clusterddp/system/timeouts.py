"""How long others may be silent before they count as lost, where the spec does not say."""

from __future__ import annotations

HOST_SILENCE_S = 30.0
"""network.host_silence: a spanning tree, a switch that restarts and a bond settle in that time."""
HEARTBEAT_TIMEOUT_S = 60.0
"""network.heartbeat_timeout: a process that waits for a file server, or is stopped for a while, survives."""
