"""Sending a directory to a host over SSH: clusterddp against scp, rsync and tar | ssh.

    python benchmarks/ssh_send.py DIRECTORY [ROUNDS]    (root: it starts a rack)

Each way sends the directory to a place that is empty, over the same sshd; `again` is the same once more, with
everything there already. clusterddp's time is that of a program that connects, starts the agent, compares, sends and
ends. The ways are run in turns; the figures are medians, and medians of each round's ratio, clusterddp's time to
theirs. `sending` is the time between the first and the last byte alone.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import sys
import time
from pathlib import Path

from tests.testbed.plan import RackPlan
from tests.testbed.rack import Rack, running_rack

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, os, sys, time
from clusterddp.planning.ssh import SshNode
from clusterddp.places.ssh.sessions import open_sessions
from clusterddp.places.ssh.upload import Uploader, upload_data
sessions = open_sessions([SshNode(host="node1", python=sys.executable)], environ=os.environ)
times = []
uploader = Uploader(sessions=sessions, watch=lambda progress: times.append(time.monotonic()))
upload_data(sys.argv[1], sys.argv[2], uploader)
sessions["node1"].close()
print(json.dumps({"sent": uploader.sent_bytes, "sending_s": times[-1] - times[0] if times else 0.0}))
"""


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    megabytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file()) / 1e6
    quoted = shlex.quote(str(source))
    with running_rack(RackPlan(nodes=["node1"], gpus_per_host=0)) as rack:
        place = rack.dir / "home" / "root" / "place"
        copied = place / source.name
        ways = {
            "clusterddp": [sys.executable, "-c", PROGRAM, str(source), str(copied)],
            "scp -r": ["scp", "-rq", str(source), f"node1:{place}/"],
            "rsync -a": ["rsync", "-a", str(source), f"node1:{place}/"],
            "tar | ssh": ["sh", "-c", f"tar -C {quoted}/.. -cf - {source.name} | ssh node1 tar -C {place} -xf -"],
        }
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            order = list(ways) if number % 2 else list(reversed(ways))
            for name in order:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                row = measure(rack, ways[name])
                row["again_s"] = measure(rack, ways[name])["wall_s"]
                if number:  # the first round warms up: caches, and our package on the host
                    rows[name].append(row)
    print(f"{megabytes:.1f} MB, {rounds} rounds")
    ours_found = rows["clusterddp"]
    for name, found in rows.items():
        wall_s = statistics.median(row["wall_s"] for row in found)
        again_s = statistics.median(row["again_s"] for row in found)
        ratio = statistics.median(ours["wall_s"] / row["wall_s"] for row, ours in zip(found, ours_found, strict=True))
        print(f"{name:11} {wall_s:6.2f} s {megabytes / wall_s:6.0f} MB/s  ratio {ratio:5.2f}  again {again_s:5.2f} s")
    sending_s = statistics.median(row["sending_s"] for row in rows["clusterddp"])
    print(f"clusterddp, sending alone: {sending_s:.2f} s, {megabytes / sending_s:.0f} MB/s")


def measure(rack: Rack, argv: list[str]) -> dict[str, float]:
    """Run one way on the head."""
    start = time.monotonic()
    done = rack.run("head", argv, env={"PYTHONPATH": str(ROOT)}, timeout_s=300)
    wall_s = time.monotonic() - start
    facts = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return {"wall_s": wall_s, **facts}


if __name__ == "__main__":
    main()
