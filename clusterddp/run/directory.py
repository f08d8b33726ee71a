"""The run directory: where each file of a run lies, and how a file is written so that no crash leaves half of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, TypeVar

from clusterddp.errors import ClusterddpError, RunNotFoundError, UsageError
from clusterddp.system.exclusive import name_new
from clusterddp.wire import build, read_object, read_value

_T = TypeVar("_T")
_RUN_NAME, _TOKEN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"), re.compile("[0-9a-f]{32}")
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_HALVES = re.compile("[\ud800-\udfff]")
_TAIL_BYTES = 8_192
MAX_ATTEMPTS = 1_000_000
"""More than any run has."""
MAX_RECORD_BYTES = 1 << 26
"""Of a record: the plan of a thousand nodes takes one MiB."""
STAGING_PREFIX = ".staging-"
SWEEP_RECORD = "sweep.json"
"""What makes a directory of the runs directory a sweep: its runs lie in it (run/sweep_dir.py)."""


class _Created(TypedDict):
    created_ns: int


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The files of one attempt: one start of the run's ranks."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def start(self) -> Path:
        """How the attempt began: ranks, master address and port, supervisors."""
        return self.path / "start.json"

    @property
    def end(self) -> Path:
        """How the attempt ended; the first process to write it is right."""
        return self.path / "end.json"

    @property
    def stop_file(self) -> Path:
        """Whoever creates this file asks the ranks to checkpoint and end (the stop contract)."""
        return self.path / "STOP"

    @property
    def stopped(self) -> Path:
        """Written by the ranks' program when it ended because of a stop: how far it came."""
        return self.path / "stopped.json"

    @property
    def claim(self) -> Path:
        """Who starts this attempt, where several could: a start of a job on Slurm; who takes it out of a queue."""
        return self.path / "claim.json"

    def is_claimed(self) -> bool:
        """Say whether a claim is there, from the directory's list: NFS may answer for one file from its cache."""
        return self.claim.name in os.listdir(self.path)

    @property
    def ranks(self) -> Path:
        """One record for each rank: host, pid, start, end, exit code."""
        return self.path / "ranks"

    @property
    def logs(self) -> Path:
        """What the ranks printed."""
        return self.path / "logs"

    def rank_record(self, rank: int) -> Path:
        """Start and end of one rank."""
        return self.ranks / f"{rank:03d}.json"

    def error_file(self, rank: int) -> Path:
        """What TORCHELASTIC_ERROR_FILE names: the rank's traceback, in torchelastic's own form."""
        return self.ranks / f"{rank:03d}.error.json"

    def stdout(self, rank: int) -> Path:
        """Standard output of one rank."""
        return self.logs / f"rank-{rank:03d}.out"

    def stderr(self, rank: int) -> Path:
        """Standard error of one rank."""
        return self.logs / f"rank-{rank:03d}.err"

    def nccl(self, rank: int) -> Path:
        """What NCCL itself says, unless the user's NCCL_DEBUG sends that elsewhere."""
        return self.logs / f"rank-{rank:03d}.nccl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        """The spec as resolved: overrides and profile included."""
        return self.path / "spec.yaml"

    @property
    def plan(self) -> Path:
        """The plan that was carried out, as `submit -n -o json` prints it."""
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        """What the run is: name, launcher, job id, when it was submitted and by which process."""
        return self.path / "run.json"

    @property
    def environment(self) -> Path:
        """Packages, git commit, Python, torch, GPUs and driver of the machine that submitted."""
        return self.path / "env.json"

    @property
    def code(self) -> Path:
        """A link to the snapshot of the code, which runs with the same content share."""
        return self.path / "code"

    @property
    def events(self) -> Path:
        """The history of the run, a row for each event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """What the trainer measured; docs/metrics.md has the keys."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The trainer's result, when it came to its end."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints, each with a manifest that has its sum."""
        return self.path / "checkpoints"

    @property
    def output(self) -> Path:
        """Where an entry puts its results that names no other place."""
        return self.path / "output"

    @property
    def tensorboard(self) -> Path:
        """The same figures for TensorBoard."""
        return self.path / "tb"

    @property
    def launcher_dir(self) -> Path:
        """What the launcher itself keeps: submitit's folder, supervisors' own logs."""
        return self.path / "launcher"

    @property
    def job_environment(self) -> Path:
        """On Slurm: the variables that go from the submitting shell to the ranks; mode 0600, like all files."""
        return self.launcher_dir / "environment.json"

    @property
    def job_secrets(self) -> Path:
        """On Slurm: the values of the spec's secrets, from the submit to the run's end, when they are removed."""
        return self.launcher_dir / "secrets.json"

    def job_answer(self, tag: str) -> Path:
        """On Slurm: what sbatch answered to the submit of the job with this tag."""
        return self.launcher_dir / f"job-{tag}.json"

    @property
    def cancel_file(self) -> Path:
        """Whoever creates this file asks the supervisors to end the run at once."""
        return self.path / "CANCEL"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / "attempts" / str(number))

    def attempts(self) -> list[AttemptDir]:
        """List the attempts so far, oldest first.

        It opens the directory, which makes NFS ask the server: a file that another host has made is seen.
        Raises: OSError: the run's directory is away.
        """
        try:
            names = [name for name in os.listdir(self.path / "attempts") if _NUMBER.fullmatch(name)]
        except FileNotFoundError:
            os.stat(self.path)
            return []
        return [self.attempt(number) for number in sorted(map(int, names))]

    def newest_attempt(self) -> AttemptDir:
        """Return the newest attempt of a run that has one.

        Raises: OSError: the run's directory is away, or has lost its attempts.
        """
        attempts = self.attempts()
        if not attempts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / "attempts"))
        return attempts[-1]


def is_of_another_user(path: Path) -> bool:
    """Say whether a run's directory, or a sweep's, is another user's; to root each is its own."""
    return os.geteuid() not in {0, os.stat(path).st_uid}


def is_run_name(name: str) -> bool:
    """Say whether another process may name a run so: it is one directory below that of all runs."""
    return _RUN_NAME.fullmatch(name) is not None


def is_token(text: str) -> bool:
    """Say whether this is the token of a run."""
    return _TOKEN.fullmatch(text) is not None


def list_runs(runs_dir: Path) -> list[RunDir]:
    """List the runs in `runs_dir`, those of sweeps too, oldest first; a directory without a record is no run."""
    runs: list[RunDir] = []
    for place in list_places(runs_dir):
        runs += [RunDir(place)] if is_file(RunDir(place).record) else list_runs(place)
    return sorted(runs, key=lambda run: (created_ns(run), run.name))


def list_places(runs_dir: Path) -> list[Path]:
    """List the directories in `runs_dir` that are runs or sweeps, in no order; what may not be seen is left out."""
    try:
        paths = [Path(entry.path) for entry in os.scandir(runs_dir) if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in paths if is_file(RunDir(path).record) or is_file(path / SWEEP_RECORD)]


def is_file(path: Path) -> bool:
    """Say whether a file is there and can be seen; False while its storage does not answer."""
    try:
        return path.is_file()
    except OSError:
        return False


def make_attempt_dirs(attempt: AttemptDir) -> None:
    """Make what is missing of an attempt's directories.

    Raises: OSError: the run's own directory is away; it is never made anew.
    """
    for path in (attempt.path.parent, attempt.path, attempt.ranks, attempt.logs):
        path.mkdir(mode=0o700, exist_ok=True)


def find_run(runs_dir: Path, name: str) -> RunDir:
    """Find a run by its name, an unambiguous beginning of it, `@last`, or the path of its directory.

    Raises: RunNotFoundError: there is none. UsageError: several runs begin so.
    """
    if os.sep in name and RunDir(Path(name)).record.is_file():
        return RunDir(Path(name).resolve())
    runs = list_runs(runs_dir)
    if name == "@last" and runs:
        return runs[-1]
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if name and run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        few = ", ".join(run.name for run in matches[:8]) + (", ..." if len(matches) > 8 else "")
        raise UsageError(f"{name}: {len(matches)} runs begin so: {few}")
    raise RunNotFoundError(
        f"{name}: no such run in {runs_dir}",
        hint="clusterddp list shows the runs; CLUSTERDDP_RUNS or --runs names another directory",
    )


def write_bytes(path: Path, data: bytes | memoryview, *, exclusive: bool = False) -> bool:
    """Write `data` to `path` at once or not at all: temporary file, fsync, rename, fsync of the directory.

    With `exclusive`, an existing file is left as it is and False is returned: of several writers the first one wins.
    Files are created with mode 0600.
    Raises: ClusterddpError: the file system refuses (full, read-only, quota); nothing is left behind.
    """
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            if not name_new(temporary, path):
                return False
        else:
            os.replace(temporary, path)
            temporary = None
        sync_directory(path.parent)
        return True
    except OSError as error:
        raise ClusterddpError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def write_text(path: Path, text: str, *, exclusive: bool = False) -> bool:
    """Write `text` as UTF-8; see `write_bytes`."""
    return write_bytes(path, text.encode("utf-8"), exclusive=exclusive)


def write_json(path: Path, value: Any, *, exclusive: bool = False) -> bool:
    """Write `value` as JSON; see `write_text`."""
    return write_text(path, _dump(value, indent=1) + "\n", exclusive=exclusive)


def read_json(path: Path) -> Any | None:
    """Read a JSON file; None when there is none.

    Raises: ClusterddpError: it is there and is not JSON, is `null`, is no file, or is larger than any of ours.
    """
    try:
        value = read_value(read_regular(path, MAX_RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ClusterddpError(f"{path}: not JSON: {error}") from error
    if value is None:
        raise ClusterddpError(f"{path}: holds null, which no record is")
    return value


def read_record(kind: type[_T], path: Path) -> _T | None:
    """Read a record; None when there is none.

    Raises: ClusterddpError: what is there is none; see `read_json` and `build`.
    """
    value = read_json(path)
    return None if value is None else build_record(kind, value, str(path))


def build_record(kind: type[_T], value: Any, where: str) -> _T:
    """Make a record of JSON.

    Raises: ClusterddpError: it holds something else, `where`.
    """
    try:
        return build(kind, value)
    except ValueError as error:
        what = str(error).removeprefix("it.")
        raise ClusterddpError(f"{where}: not a {kind.__name__}: {what}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file that others may have put there: a pipe or a device is not waited for, and not read.

    Raises: ClusterddpError: it is no file. OSError: it cannot be opened.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ClusterddpError(f"{path}: is no file")
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a file that others may have put there, whole.

    Raises: ClusterddpError: it is no file, or has more than `max_bytes`. OSError: it cannot be opened.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ClusterddpError(f"{path}: has more than {max_bytes:,} bytes")
    return data


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one row in a single write, so that rows of several writers never mix.

    A disk that runs full may take a part of it; the next row begins on a line of its own.
    Raises: OSError: the row is not there, or not whole.
    """
    line = (_dump(row) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Read rows; a last line that is still being written, or was cut by a crash, is left out.

    Raises: ClusterddpError: it is no file.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(MAX_RECORD_BYTES):
            with contextlib.suppress(ValueError):
                yield read_object(line)


def created_ns(run: RunDir) -> int:
    """Read when a run was made; one whose record is damaged must not hide all the others: it counts as the oldest."""
    try:
        found = read_record(_Created, run.record)
    except (ClusterddpError, OSError):
        return 0
    return found["created_ns"] if found else 0


def _dump(value: Any, *, indent: int | None = None) -> str:
    """Write JSON; halves of a character, which a host may send and UTF-8 does not have, are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _HALVES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def read_tail(path: Path) -> str:
    """Read the end of a log, without the blank lines that follow it."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", errors="replace").rstrip()
    except (OSError, ClusterddpError):
        return ""


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
