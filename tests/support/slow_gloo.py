"""Source text for ranks whose threads of gloo run when nothing else on their core wants to."""

STARVE_GLOO = """
import os
from pathlib import Path
def starve_gloo():
    cpu = {min(os.sched_getaffinity(0))}
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpu)
        if "gloo" in (thread / "comm").read_text():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
"""
