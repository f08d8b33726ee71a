"""A fuzzer of everything that is read from outside: each case is a valid example, mutated, and read as it always is.

    python -m tests.fuzz [--seed 1] [--cases 200000] [--first 0] [--only NAME]
    python -m tests.fuzz 1:4711                       one case again, with what was read and the traceback

A case passes when the reading gives a result or a ClusterddpError with a message. Anything else is a finding: another
error, more than a second of computing, memory beyond the limit, a file written or a process started outside of the
place of the case. What is read, and by what, is the table in targets.py.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError, UsageError
from tests.fuzz.mutations import Example, mutate

CASE_S = 1.0
"""Seconds that one case may compute."""
WAIT_S = 60.0
"""Seconds that one case may take on a machine that is busy with other things."""
MEMORY_BYTES = 300 << 20
"""Beyond what the process has before the first case."""


@dataclass(kw_only=True)
class Place:
    """Where cases may write, and what they did elsewhere."""

    root: Path
    offences: list[str] = field(default_factory=list)
    watching: bool = False
    is_any_place_allowed: bool = False
    """A user's own launcher may name any place of the user's: what is tried is stopped, and is no finding."""

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Stop what would leave the place."""
        if not self.watching:
            return
        if event in {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill"}:
            self._stop(f"{event} {arguments!r:.200}")
        paths = _written(event, arguments)
        for path in paths:
            self.watching = False  # realpath is heard, too
            try:
                inside = os.fsdecode(os.path.realpath(path)).startswith((f"{self.root}{os.sep}", "/dev/null"))
            except (ValueError, OSError):
                inside = True  # no name of a file: the call itself will fail
            finally:
                self.watching = True
            if not inside:
                self._stop(f"{event} {path!r:.200}")

    def _stop(self, what: str) -> None:
        if not self.is_any_place_allowed:
            self.offences.append(what)
        raise PermissionError(1, "not in a case", what)


def _written(event: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the paths that an audit event is about to write to."""
    if event == "open":
        path, _, flags = (*arguments, None, 0)[:3]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        return [path] if writes and isinstance(path, str | bytes) else []
    if event in {"os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.truncate", "shutil.rmtree"}:
        return [path for path in arguments[:1] if isinstance(path, str | bytes)]
    if event in {"os.rename", "os.link", "os.symlink"}:
        return [path for path in arguments[1:2] if isinstance(path, str | bytes)]
    return []


class TooSlowError(BaseException):
    """A case has computed for too long; no `except Exception` may catch it."""


@contextmanager
def limited() -> Iterator[None]:
    """Bound the time of one case."""

    armed = [True]

    def late(number: int, frame: object) -> None:
        if armed:
            raise TooSlowError(signal.Signals(number).name)

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CASE_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    try:
        yield
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What went wrong in a case."""

    case: str
    target: str
    what: str
    data: bytes
    trace: str = ""

    @property
    def kind(self) -> str:
        """What findings of one cause have in common."""
        ours = [
            line.strip()
            for line in self.trace.splitlines()
            if "/clusterddp/" in line and line.strip().startswith("File")
        ]
        return f"{self.target}: {self.what.partition(':')[0]} at {ours[-1] if ours else self.what}"


class Fuzzer:
    """The targets, and a place for their cases."""

    def __init__(self, place: Place) -> None:
        from tests.fuzz.targets import make_targets

        self.place = place
        self.targets = make_targets(place.root)

    def run(self, seed: int, number: int) -> Finding | None:
        """Run one case; the same seed and number are the same case."""
        rng = random.Random(f"{seed}:{number}")
        target = self.targets[number % len(self.targets)]
        example = rng.choice(target.examples)
        data = mutate(rng, example)
        return self._read(f"{seed}:{number}", target, example, data, rng)

    def check_examples(self) -> None:
        """Read every example as it is: a fuzzer whose examples are refused finds nothing behind the refusal."""
        for target in self.targets:
            for example in target.examples:
                if target.reads_examples:
                    with limited(), suppress(UsageError):  # no rank has failed
                        target.read(example.what, example.data, random.Random(0))

    def _read(self, case: str, target: Any, example: Example, data: bytes, rng: random.Random) -> Finding | None:
        def finding(what: str, trace: str = "") -> Finding:
            return Finding(case=case, target=target.name, what=what, data=data, trace=trace)

        self.place.offences.clear()
        self.place.is_any_place_allowed = target.is_any_place_allowed
        begun = time.process_time()
        try:
            with limited():
                self.place.watching = True
                try:
                    target.read(example.what, data, rng)
                finally:
                    self.place.watching = False
        except ClusterddpError as error:
            if not (isinstance(error.message, str) and error.message and isinstance(error.hint, str | None)):
                return finding(f"no message: {error.message!r}, {error.hint!r}", traceback.format_exc())
        except (Exception, TooSlowError) as error:
            return finding(f"{type(error).__name__}: {error!s:.300}", traceback.format_exc())
        if self.place.offences:
            return finding(f"left its place: {self.place.offences[0]}")
        if time.process_time() - begun > CASE_S:
            return finding("too slow, and nothing could interrupt it")
        return None


@contextmanager
def fuzzer() -> Iterator[Fuzzer]:
    """Prepare a place and the targets, with bounded memory; for a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        root = Path(directory).resolve()
        for name in ("home", "state", "work", "bin"):
            (root / name).mkdir()
        for name in [name for name in os.environ if name.startswith(("CLUSTERDDP", "SLURM", "SSH_"))]:
            del os.environ[name]
        os.environ |= {"HOME": str(root / "home"), "XDG_STATE_HOME": str(root / "state"), "PATH": str(root / "bin")}
        os.environ |= {"XDG_CONFIG_HOME": str(root / "home"), "TERM": "xterm", "FORCE_COLOR": "1"}
        os.chdir(root / "work")
        place = Place(root=root)
        sys.addaudithook(place.hear)
        made = Fuzzer(place)
        made.check_examples()
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        yield made


def main() -> int:
    """Run cases, and print each kind of finding once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", help="SEED:NUMBER, to run that one alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name holds this")
    given = parser.parse_args()
    sys.dont_write_bytecode = True  # of a module that a case is the first to need, it would be a file out of its place
    with fuzzer() as made:
        if given.case:
            seed, _, number = given.case.partition(":")
            return _show(made.run(int(seed), int(number)))
        found = _run_all(made, given)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{given.cases} cases with seed {given.seed}: {len(found)} kinds of findings; peak {peak} MiB", flush=True)
    return 1 if found else 0


def _run_all(made: Fuzzer, given: argparse.Namespace) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for number in range(given.first, given.first + given.cases):
        if given.only in made.targets[number % len(made.targets)].name:
            finding = made.run(given.seed, number)
            if finding is not None and found.setdefault(finding.kind, finding) is finding:
                print(f"{finding.case} {finding.kind}\n    {finding.what!r}\n    {finding.data!r:.300}", flush=True)
    return found


def _show(finding: Finding | None) -> int:
    if finding is None:
        print("passes")
        return 0
    print(f"{finding.target}: {finding.what}\n{finding.trace}\n{finding.data!r:.4000}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
