#!/usr/bin/env python
"""The program that the ranks of batch scripts run: what it was started with goes into a file, one for each process.

It is copied beside a script under the names that the script uses, and knows nothing of clusterddp.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
IDS = ("SigBlk", "SigIgn")
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def seen() -> dict[str, object]:
    """Collect what a process can see of how it was started."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    umask = os.umask(0)
    os.umask(umask)
    return {
        "argv": sys.argv,
        "python": sys.executable,
        "flags": [sys.flags.optimize, sys.flags.isolated, sys.flags.dev_mode],
        "cwd": str(Path.cwd()),
        "environ": dict(os.environ),
        "affinity": sorted(os.sched_getaffinity(0)),
        "umask": oct(umask),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "stack": resource.getrlimit(resource.RLIMIT_STACK),
        "nice": os.nice(0),
        "signals": {name: status[name].strip() for name in IDS},
        "terminal": [os.isatty(number) for number in (0, 1, 2)],
        "host": os.uname().nodename,
        "uid": [os.getuid(), os.geteuid(), os.getgid()],
    }


def reduce() -> dict[str, object]:
    """Meet the other ranks, by the variables that are here, and add up their ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    environ = os.environ
    rank = int(environ.get("RANK") or environ.get("OMPI_COMM_WORLD_RANK") or environ.get("SLURM_PROCID") or 0)
    world = environ.get("WORLD_SIZE") or environ.get("OMPI_COMM_WORLD_SIZE") or environ.get("SLURM_NTASKS") or 1
    dist.init_process_group("gloo", rank=rank, world_size=int(world))
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    answer = {"rank": rank, "world": dist.get_world_size(), "sum": total.item()}
    dist.barrier()
    dist.destroy_process_group()
    return answer


def value(option: str, default: str = "") -> str:
    """Return the word behind an option of the probe."""
    words = sys.argv[1:]
    return words[words.index(option) + 1] if option in words else default


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write(record: dict[str, object]) -> None:
    """Write the file of this process."""
    target = HERE / "probed"
    target.mkdir(exist_ok=True)
    place = target / f"{time.time_ns()}-{os.uname().nodename}-{os.getpid()}.json"
    place.with_suffix(".new").write_text(json.dumps(record))
    place.with_suffix(".new").rename(place)


def await_signal(number: str) -> None:
    """Wait for the signal that `--await` names, which has a handler once the file is written."""
    got: list[int] = []
    awaited = getattr(signal, value("--await"))
    signal.signal(awaited, lambda sent, frame: got.append(sent))
    write(seen())
    deadline = time.monotonic() + 200
    while not got and time.monotonic() < deadline:
        time.sleep(0.05)
    say(f"rank {number} got {got}")


def end(number: str) -> None:
    """End as the options say; with `--of N`, rank N alone."""
    if value("--of", number) != number:
        return
    if "--raise" in sys.argv:
        raise ValueError("the loss is nan")
    if "--kill" in sys.argv:
        os.kill(os.getpid(), int(value("--kill")))
    if "--exit" in sys.argv:
        sys.exit(int(value("--exit")))


def main() -> None:
    """Write what is seen, and do what the options say."""
    number = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    if "--await" in sys.argv:
        return await_signal(number)
    record = seen()
    if "--reduce" in sys.argv:
        record["reduced"] = reduce()
    if "--stdin" in sys.argv:
        record["stdin"] = sys.stdin.read()
    write(record)
    say(f"rank {number} of {Path(sys.argv[0]).name}")
    if "--stderr" in sys.argv:
        sys.stderr.write(f"rank {number} warns\n")
    time.sleep(float(value("--sleep", "0")))
    return end(number)


if __name__ == "__main__":
    main()
