"""Children of ranks that have lost the variable of their run, and what is left of them."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

KINDS = 4
"""How many such children each rank starts: in its session, in one of its own, a daemon, one that empties its own."""
_LOSE = """
import os, subprocess, sys
from pathlib import Path
overwrites = '''
import ctypes, time
start, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
ctypes.memset(start, 0, end - start)
time.sleep(600)
'''
empty = {{"PATH": os.environ["PATH"]}}
subprocess.Popen(["sleep", "{tag}"], env=empty)
subprocess.Popen(["sleep", "{tag}"], env=empty, start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep {tag} &"], env=empty, check=True)
child = subprocess.Popen([sys.executable, "-c", overwrites, "{tag}"], start_new_session=True)
while b"CLUSTERDDP_COOKIE" in Path(f"/proc/{{child.pid}}/environ").read_bytes():
    pass
"""


class LostChildren:
    """The children of the ranks of one run, known by an argument that no other process has."""

    def __init__(self) -> None:
        self.tag = f"999.{random.randrange(10**12):012}"
        self.program = _LOSE.format(tag=self.tag)
        """What a rank does to have them."""

    def alive(self) -> list[int]:
        """List those that live, on every host of a rack, by /proc alone: not what the product itself uses."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith((b"sleep", b"python", b"python3")) and self.tag.encode() in words[1:]:
                    found.append(int(entry.name))
        return sorted(found)

    def end(self) -> None:
        """Leave nothing behind, whatever the test found out."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
