"""Starts the supervisors of a gang as the task that carries a run does: `task.py ORDERS.json`.

ORDERS.json holds one order for each node, node 0 first, without links. Node 0's supervisor is started first and says
its link; the others are given it. Every supervisor's standard input is a pipe that stays open as long as this process
lives. The head receives the end of another supervisor. Prints {"supervisors": [pids]} and, when all have ended,
{"exit_codes": [...]}.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def start(order, link):
    token, node_rank = order["gang"]["token"], order["node_rank"]
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterddp.node.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ) | {"CLUSTERDDP_COOKIE": f"{token}.s{node_rank}"},
        pass_fds=order.get("hold", ()),
    )
    process.stdin.write(json.dumps(order | {"link": link}).encode() + b"\n")
    process.stdin.flush()
    return process


orders = json.loads(Path(sys.argv[1]).read_text())
head = start(orders[0], None)
link = json.loads(head.stdout.readline())["link"]
supervisors = [head, *[start(order, link) for order in orders[1:]]]
print(json.dumps({"supervisors": [process.pid for process in supervisors], "link": link}), flush=True)
reported = set()
while any(process.poll() is None for process in supervisors):
    for order, process in list(zip(orders, supervisors, strict=True))[1:]:
        if process.poll() is not None and process.pid not in reported:
            reported.add(process.pid)
            with contextlib.suppress(BrokenPipeError):
                news = {"ended": order["node_rank"], "exit_code": process.returncode}
                head.stdin.write(json.dumps(news).encode() + b"\n")
                head.stdin.flush()
    time.sleep(0.02)
print(json.dumps({"exit_codes": [process.returncode for process in supervisors]}), flush=True)
