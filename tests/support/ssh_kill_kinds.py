"""What can be killed of a run on a LAN of private hosts, drawn with a seed, and a gang for it.

Two hosts with two ranks each; every rank has a child, and an orphan in a session of its own, which both ignore SIGTERM.
Ranks speak to rank 0 all the time, so that the end of one is felt by the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.testbed.plan import RackPlan

GUARD, LISTENER, LAUNCHER, SESSION = "guard", "sshd", "launcher", "session"
RANK, SUPERVISOR, BOTH, POWER, CABLE = "rank", "supervisor", "supervisor and guard", "power", "cable"
NODES = ("node1", "node2")
LAN = RackPlan(nodes=NODES, private_hosts=True, slurm=False)
START_S = {LAUNCHER: 5.0, SESSION: 0.5}
"""A kill during the start comes within so many seconds after the run is there, else within 2.5, when its victim is."""
SPEC = """\
name: kills
launcher: ssh
device: cpu
resources: {procs_per_node: 2}
ssh: {hosts: [node1, node2]}
python: /opt/bare/bin/python
entry: {script: gang.py}
"""
CHILD, ORPHAN = "sleep 600", "sleep 601"
GANG = f"""\
import os, socket, subprocess, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
subprocess.Popen(["sh", "-c", "trap '' TERM; exec {CHILD}"])
subprocess.run(["sh", "-c", "trap '' TERM; (setsid {ORPHAN} &)"])
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(address)]
            break
        except OSError:
            time.sleep(0.05)
while True:
    for peer in peers:
        if rank == 0:
            peer.sendall(b".")
        if not peer.recv(1):
            raise ConnectionError("Connection closed by peer")
        if rank:
            peer.sendall(b".")
    time.sleep(0.05)
"""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: of what, on which node (0: the head's), and when."""

    victim: str
    node: int
    moment: str
    """`start`: while the command is at work; `later`: all ranks are up."""
    delay_s: float

    @property
    def host(self) -> str:
        return NODES[self.node]

    @property
    def goes_on(self) -> bool:
        """True when a run that is up has to bear it."""
        return self.victim in {GUARD, LISTENER, SESSION, LAUNCHER}


KINDS = [
    *((victim, node, "later") for victim in (RANK, SUPERVISOR, GUARD, BOTH, POWER, CABLE, SESSION) for node in (0, 1)),
    *((victim, None, "start") for victim in (RANK, SUPERVISOR, GUARD, POWER, CABLE, SESSION, LISTENER)),
    *((LAUNCHER, None, "start"), (LAUNCHER, None, "start"), (LISTENER, None, "later")),
]


def draw_kills(seed: int, count: int, victims: tuple[str, ...] = ()) -> list[Kill]:
    """Draw kills, of some victims only if any are named: every kind comes about equally often, in random order."""
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not victims or kind[0] in victims]
    deck: list[tuple[str, int | None, str]] = []
    while len(deck) < count:
        deck += chance.sample(kinds, len(kinds))
    kills = []
    for victim, node, moment in deck[:count]:
        delay_s = chance.uniform(0, START_S.get(victim, 2.5) if moment == "start" else 3.0)
        where = chance.choice((0, 1)) if node is None else node
        kills.append(Kill(victim=victim, node=where, moment=moment, delay_s=delay_s))
    return kills
