"""Kill random processes of local runs with SIGKILL, and count what is left and what the record says.

    python benchmarks/random_kills.py [SEED [COUNT]]
    python benchmarks/random_kills.py SEED COUNT submit

Each round submits a run of 2 nodes x 2 ranks that trains on the CPU, waits for up to nine seconds, and kills one or two
of its processes: submitit's controller, the task, supervisors, guards, fork servers, ranks. Each node also has a child
of its ranks that was started with an empty environment in a session of its own. Right is: nothing of the run is left,
it is FAILED and the cause is named; or that it goes on, when only guards were killed, or a fork server before there
were ranks, in whose place the supervisor starts each by itself. A run whose task dies before a supervisor is there has
no process that could write its end; it must be LOST.

With `submit` each round kills the submit itself. Right is: no run, or a whole one that has COMPLETED or is LOST.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = """
name: random_kills
device: cpu
resources: {nodes: 2, procs_per_node: 2}
snapshot: false
train: {model: fastnet, width: 0.125, dataset: shapes, samples: 4000, epochs: 40, batch_size: 32}
"""
SITECUSTOMIZE = """
import os, subprocess, sys
if ".n" in os.environ.get("CLUSTERDDP_COOKIE", ""):
    asleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)", os.environ["CLUSTERDDP_RUN"]]
    subprocess.Popen(asleep, env={}, start_new_session=True)
"""
GONE_WITHIN_S = 45.0
"""On a busy machine; a run whose fork server was killed shows only then that it goes on."""


def main() -> int:
    words = sys.argv[1:]
    play = one_submit if words[2:] == ["submit"] else one_round
    seed, count = [int(word) for word in (words + ["1", "40"][len(words) :])[:2]]
    chance = random.Random(seed)
    wrong = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:  # the last task may still write
        (Path(directory) / "sitecustomize.py").write_text(SITECUSTOMIZE)
        os.environ["PYTHONPATH"] = f"{directory}:{os.environ.get('PYTHONPATH', '')}"
        for number in range(count):
            line, right = play(chance, Path(directory))
            wrong += not right
            print(f"{number:3d}  {'ok   ' if right else 'WRONG'}  {line}", flush=True)
    print(f"{count - wrong} of {count} right (seed {seed})")
    return 1 if wrong else 0


def one_round(chance: random.Random, directory: Path) -> tuple[str, bool]:
    """Submit, kill, look; return what happened in words, and whether it is as it should be."""
    spec = directory / "job.yaml"
    spec.write_text(SPEC)
    submitted = json.loads(clusterddp(directory, "submit", str(spec), "-o", "json"))
    run = submitted["run"]
    token = json.loads((Path(submitted["run_dir"]) / "run.json").read_text())["token"]
    time.sleep(chance.uniform(0, 9))
    alive = processes_of(token)
    victims = chance.sample(alive, min(chance.choice([1, 1, 2]), len(alive)))
    killed_at = time.monotonic()
    for pid, _ in victims:
        os.kill(pid, signal.SIGKILL)
    roles = " ".join(role for _, role in victims)
    if all(role.startswith("g") for _, role in victims):
        return f"killed {roles}: the run goes on", goes_on(directory, run)
    while (processes_of(token) or children_of(run)) and time.monotonic() < killed_at + GONE_WITHIN_S:
        time.sleep(0.02)
        start = Path(submitted["run_dir"]) / "attempts/0/start.json"
        if start.exists() and "the fork server ended with SIGKILL" in start.read_text():
            return f"killed {roles}, a fork server: the run goes on", goes_on(directory, run)
    took = time.monotonic() - killed_at
    left = [*processes_of(token), *children_of(run)]
    found = status(directory, run)
    cause = found["root_cause"]
    never_started = cause is None and "task" in roles and all(rank["pid"] is None for rank in found["ranks"])
    right = not left and (found["state"] == "FAILED" if cause else never_started)
    return (
        f"killed {roles}: gone after {took:.2f} s, {found['state']}, {cause['error'] if cause else 'no cause'}",
        right,
    )


def one_submit(chance: random.Random, directory: Path) -> tuple[str, bool]:
    """Kill a submit, look at the run that it has left, if any."""
    place = Path(tempfile.mkdtemp(dir=directory))
    (place / "entry.py").write_text("print('hello')\n")
    (place / "job.yaml").write_text("name: random_kills\nentry: {script: entry.py}\n")
    after_s = chance.uniform(0, 1.2)
    process = subprocess.Popen([sys.executable, "-m", "clusterddp", "submit", "job.yaml"], cwd=place)
    time.sleep(after_s)
    process.kill()
    process.wait()
    runs = json.loads(clusterddp(place, "list", "-o", "json"))
    for run in runs:
        subprocess.run([sys.executable, "-m", "clusterddp", "wait", run["run"]], cwd=place, check=False)
    states = [status(place, run["run"])["state"] for run in runs]
    return f"killed after {after_s:.2f} s: {states}", states in ([], ["COMPLETED"], ["LOST"])


def goes_on(directory: Path, run: str) -> bool:
    """Say whether a run reaches its training, and end it."""
    deadline = time.monotonic() + 60
    while not (progress := status(directory, run)["progress"]) and time.monotonic() < deadline:
        time.sleep(0.5)
    state = status(directory, run)["state"]
    clusterddp(directory, "cancel", run)
    return bool(progress) and state == "RUNNING"


def processes_of(token: str) -> list[tuple[int, str]]:
    """List (pid, role) of the live processes of a run, by /proc alone: not what the product itself uses."""
    mark = f"CLUSTERDDP_COOKIE={token}.".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            _, carries, rest = (entry / "environ").read_bytes().partition(mark)
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if carries and state not in "ZX":
            found.append((int(entry.name), rest.partition(b"\0")[0].decode()))
    return sorted(found)


def children_of(run: str) -> list[str]:
    """List the live children without an environment of a run."""
    last_words = b"sleep(600)\0" + run.encode() + b"\0"
    return [entry for entry in os.listdir("/proc") if entry.isdigit() and command_of(entry).endswith(last_words)]


def command_of(pid: str) -> bytes:
    """Read a command line; empty for a process that has ended."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


def status(directory: Path, run: str) -> dict[str, object]:
    return json.loads(clusterddp(directory, "status", run, "-o", "json"))


def clusterddp(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "clusterddp", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
