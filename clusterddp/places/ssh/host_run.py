"""A run on its hosts: which of its files are downloaded and how, what each host last reported (`launcher/hosts.json`).

Commands that ask the hosts write the reports, all read them. The state of the run follows from them, without a
connection (`ask_reports`); a command that needs the current state synchronises first (sync.py). A supervisor or guard
on any host means that the run goes on, and none on all hosts that it has ended. If the head's host does not answer,
this is unknown, unless another node has recorded an end. Which node has the head is in the newest `start.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.places.base import Report, no_report
from clusterddp.run.attempts import AttemptEnd, final_end, parse_end
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.gang import Gang
from clusterddp.run.record import ProcessIdentity, RunRecord, read_gang, read_run
from clusterddp.run.seal import demand_sealed, mark_of
from clusterddp.run.state import Answer, Records, RunState, RunView, derive_state
from clusterddp.system.files import read_json, read_last_jsonl, write_json
from clusterddp.wire import build

if TYPE_CHECKING:
    from clusterddp.planning.ssh import SshNode

Listed = tuple[int, int]
"""A file in a host's listing: its size in bytes, its mtime in ns since the epoch."""
Kind = Literal["grows", "whole", "end", "rows", "large"]
"""How a file is downloaded. grows: new bytes are appended. whole: small, replaced at once. end: small, never replaced.
rows: they are added to the local ones. large: under a temporary name first, and checked."""
_N = "[0-9]{1,9}"
_OF_ATTEMPT = re.compile(rf"attempts/{_N}/")
_MANIFEST = re.compile(rf"checkpoints/step-(?P<step>{_N})-a(?P<attempt>{_N})\.json")
_LOGS = rf"attempts/(?P<attempt>{_N})/logs"
_FILES: tuple[tuple[str, Kind, str | None], ...] = (
    (rf"attempts/{_N}/ranks/(?P<rank>{_N})(\.error)?\.json", "whole", None),
    (rf"attempts/{_N}/results/(?P<rank>{_N})\.pkl", "large", "results"),
    (rf"{_LOGS}/rank-(?P<rank>{_N})\.(out|err|nccl)", "grows", "logs"),
    (rf"{_LOGS}/node-(?P<node>{_N})\.times", "grows", "logs"),
    (rf"{_LOGS}/setup-(?P<node>{_N})\.log", "grows", "logs"),
    (rf"launcher/supervisor-(?P<node>{_N})\.log", "grows", "logs"),
    (rf"attempts/{_N}/end\.json", "end", None),
    (rf"attempts/{_N}/((start|stopped|usage|stacks/[A-Za-z0-9-]{{1,40}})\.json|ASKED)|summary\.json", "whole", None),
    (r"metrics\.jsonl", "grows", None),
    (r"events\.jsonl", "rows", None),
    (r"tb/(?s:.*)", "grows", "metrics"),
    (r"(checkpoints|output)/(?s:.*)", "large", "checkpoints"),
)
"""The paths of files on a host, how they are downloaded, and which part of `ssh.fetch` they are; None: always wanted.

A file of a rank or of a node is that host's; the others come from the head's host (`_has_of_run`).
"""
_PATTERNS = [(re.compile(pattern), kind, part) for pattern, kind, part in _FILES]
_QUIET_WRITE_S = 10.0
"""How old the times in `hosts.json` may get while nothing else changes."""
_LOCK_S = 5.0
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What one host last reported of a run; times are of the machine that asked, in seconds since the epoch."""

    host: str
    asked: float
    """When it was last asked."""
    reached: float | None = None
    """When it last answered; None: never."""
    error: str | None = None
    """Why it did not answer when it was last asked; None: it answered."""
    alive: tuple[str, ...] = ()
    """Roles of the run's processes there: `s0` supervisor of node 0, `g0` its guard, `n0` its ranks."""
    boot: str = ""
    """The boot id of the host."""
    has_run: bool = False
    """True if the run's directory is there."""
    end_attempt: int | None = None
    end: dict[str, Any] | None = None
    """The newest `end.json` in the host's copy of the run; only that of the head's host is final."""
    checkpoints: tuple[str, ...] = ()
    """Names of the checkpoints there, oldest first."""
    start: str = ""
    """Which start of the run this is about (`start_of`); a report from before a resume does not count after it."""
    complete: int | None = None
    """The attempt after whose end everything that the spec fetches from this host was downloaded."""
    last_output: float | None = None
    """When a rank there last wrote to its log in the newest attempt, by the host's clock."""

    @property
    def is_supervised(self) -> bool:
        """True while a supervisor or guard lives there, which will record how the run ends."""
        return any(role[:1] in {"s", "g"} for role in self.alive)

    @property
    def own_end(self) -> AttemptEnd | None:
        return parse_end(self.end) if self.end else None


def start_of(record: RunRecord) -> str:
    """Return a name for the last start of a run, by a submit or a resume."""
    return f"attempt {record.base_attempt}, {record.job_id}"


def reports_path(run: RunDir) -> Path:
    return run.launcher_dir / "hosts.json"


def read_reports(run: RunDir) -> dict[str, HostReport]:
    """Read the reports of all hosts that were ever asked, by their SSH names; keys of newer versions are dropped.

    A damaged file counts as none: the hosts report everything again.
    """
    try:
        data = read_json(reports_path(run)) or {}
        return {host: build(HostReport, facts | {"host": host}) for host, facts in data.get("hosts", {}).items()}
    except (ClusterddpError, ValueError, TypeError, AttributeError):
        return {}


def write_reports(run: RunDir, reports: Iterable[HostReport]) -> None:
    """Replace the reports of all hosts."""
    write_json(reports_path(run), {"hosts": {report.host: dataclasses.asdict(report) for report in reports}})


def ask_reports(records: Records) -> Answer:
    """Say what the hosts of a run, in their last reports since its start, know of it."""
    record = records.record
    submitter = None if records.was_handed_over else records.submitter
    if submitter and submitter.alive():
        return Answer(life="ended")  # no host has it yet
    gang = read_gang(records.run)
    hosts, head = [node.host for node in gang.nodes], gang.node(head_of(records.run)).host
    reports = {host: report for host, report in read_reports(records.run).items() if report.start == start_of(record)}
    if mark := mark_of(records.run):
        reason = "belongs to another user, and only that user can connect to its hosts"
        reason = "is unsealed, so its hosts are not asked" if mark == "unsealed" else reason
        return Answer(life="unknown", words=reason, notes=(_last_known(records, reports.get(head)),))
    unreached = [host for host in hosts if host not in reports or reports[host].error is not None]
    supervised = [host for host, report in reports.items() if report.is_supervised and report.error is None]
    if supervised and head not in unreached:
        return Answer(life="alive", notes=tuple(_why_unreached(reports, host) for host in unreached if host in reports))
    # The head's record comes first. Another node records an end when it loses the head, or when the head's storage
    # takes no record.
    number = records.attempt.number if records.attempt else 0
    for report in sorted(reports.values(), key=lambda report: report.host != head):
        end, of = report.own_end, report.end_attempt
        if gang.min_nodes is not None and supervised and report.host != head:
            break  # the others may go on without that node
        if end and not end.will_restart and of is not None and of >= number:
            return Answer(life="ended", end=end, end_attempt=records.run.attempt(of))
    why = [_why_unreached(reports, host) for host in unreached]
    if head in unreached:
        others = [f"it is still supervised on {', '.join(supervised)}"] if supervised else []
        words = "; ".join([_why_unreached(reports, head), *others])
    elif unreached:
        words = "; ".join([f"it is not supervised on {head}", *why])
    else:
        words = f"its supervisors on {', '.join(hosts)} are gone"
        return Answer(life="ended", words=words, notes=_what_is_left(records, reports, head))
    return Answer(life="unknown", words=words, notes=(_last_known(records, reports.get(head)),))


def read_unreached(run: RunDir) -> dict[str, str]:
    """Read which hosts of a run did not answer when they were last asked: host -> a sentence with the reason."""
    reports = read_reports(run)
    return {host: _why_unreached(reports, host) for host, report in reports.items() if report.error is not None}


def _why_unreached(reports: Mapping[str, HostReport], host: str) -> str:
    report = reports.get(host)
    if report is None or report.error is None:
        return f"{host} has not been asked"
    return f"{host} cannot be reached ({report.error})"


def _what_is_left(records: Records, reports: Mapping[str, HostReport], head_host: str) -> tuple[str, ...]:
    """Say what the hosts of a run that has ended tell of its end."""
    notes = []
    head = reports[head_host]
    if not head.has_run and records.record.job_id is not None:
        notes.append(f"its directory on {head_host} is gone")
    supervisor = (records.start or {}).get("supervisor")
    if supervisor and supervisor.boot and head.boot and head.boot != supervisor.boot:
        notes.append(f"{head_host} has rebooted since")
    left = [report.host for report in reports.values() if report.alive]
    if left:
        where = ", ".join(left)
        notes.append(f"its processes are left on {where} (clusterddp cancel {records.run.name} ends them)")
    return tuple(notes)


def _last_known(records: Records, head: HostReport | None) -> str:
    """Return the last known state: `last known: RUNNING, step 1200, 3 min ago`."""
    if records.start is None and not records.end and records.record.job_id is not None:
        facts = [f"started as {records.record.job_id}"]
    else:
        facts = [derive_state(records, Answer(life="alive")).state.value]
    step = _read_step(records.run) if records.start else None
    facts += [f"step {step}"] if step is not None else []
    reached = head.reached if head else None
    facts += [ago(time.time() - reached)] if reached else []
    return f"last known: {', '.join(facts)}"


def _read_step(run: RunDir) -> int | None:
    """Read the newest step from the last rows of the metrics."""
    with contextlib.suppress(OSError, ClusterddpError):
        steps = [row["step"] for row in read_last_jsonl(run.metrics, 8192) if isinstance(row.get("step"), int)]
        return steps[-1] if steps else None
    return None


def ago(seconds: float) -> str:
    """Write how long ago something was, in the largest unit that fits."""
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s or (seconds >= length_s and unit != "days"):
            return f"{seconds // length_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """What is downloaded besides the records, which always are."""

    logs: frozenset[int] = frozenset()
    """Ranks whose logs are wanted while the run goes on."""
    first_attempt: int | None = None
    """The first attempt whose logs are wanted; None: the newest one."""
    tails: tuple[Path, int] | None = None
    """Of logs only so many bytes of the end, below this directory, where more than that is not here yet."""
    results: bool = False
    """True when the run has ended: everything that `ssh.fetch` of its spec names."""
    while_supervised: bool = False
    """With `results`: ask again while a supervisor or guard of the run lives, which may write more."""
    after_end: bool = False
    """The records of a run that has ended, too: the head's host may still send a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRun:
    """A run on one host."""

    run: RunDir
    name: str
    """The name of its directory on the host."""
    token: str = dataclasses.field(repr=False)
    node: SshNode
    """The host."""
    ranks: frozenset[int]
    """Those that it may run; which it had in an attempt may differ from that."""
    fetch: tuple[str, ...]
    is_elastic: bool = False
    """True: attempts may have different nodes."""
    wants: Wants = Wants()
    start: str = ""
    """Which start of the run the host is asked about (`start_of`)."""
    head: int = 0
    """The node whose supervisor is the head now."""

    @property
    def host(self) -> str:
        return self.node.host

    @property
    def is_head(self) -> bool:
        return self.node.node_rank == self.head

    def wanting(self, wants: Wants) -> HostRun:
        """Return it with these wants and the current start of the run."""
        # The start is read before the host is asked: an answer never counts for a later start.
        head = head_of(self.run) if self.is_elastic else 0
        return dataclasses.replace(self, wants=wants, start=start_of(read_run(self.run)), head=head)

    def wanting_from(self, newest: int) -> HostRun:
        """Return it with the first attempt whose logs are wanted filled in; `newest`: the newest attempt."""
        if self.wants.first_attempt is not None:
            return self
        return dataclasses.replace(self, wants=dataclasses.replace(self.wants, first_attempt=newest))

    def place_of(self, path: str) -> Path:
        """Return the local path of a file of the host."""
        if not self._has_rows(path):
            return self.run.path / path
        return self.run.launcher_dir / f"node-{self.node.node_rank}-{path}"

    def kind_of(self, path: str) -> Kind | None:
        """Return how a file is downloaded; None if it is not.

        A host may list any name; only names below the run's directory, and none below its code, get a kind.
        """
        for pattern, kind, part in _PATTERNS:
            if match := pattern.fullmatch(path):
                if not self._has(match) or not (part is None or self._wants(part, match)):
                    return None
                return "rows" if self._has_rows(path) else kind
        return None

    def _has_rows(self, path: str) -> bool:
        """Return whether a file has rows that also come from elsewhere: from this machine, or from other heads."""
        return path == "events.jsonl" or (path == "metrics.jsonl" and self.is_elastic)

    def _has(self, match: re.Match[str]) -> bool:
        """Return whether a file is one that this host writes."""
        found = match.groupdict()
        if "rank" in found:
            return int(found["rank"]) in self._ranks_in(match.string)
        if "node" in found:
            return int(found["node"]) == self.node.node_rank
        return self._has_of_run(match.string) and _is_safe(match.string)

    def _has_of_run(self, path: str) -> bool:
        """Return whether the host writes a file of no rank or node: the head does, and there may have been others."""
        if not self.is_elastic or not path.startswith("attempts/"):
            return self.is_head or (self.is_elastic and path == "metrics.jsonl")  # of attempts in which it had the head
        if path.endswith("/start.json"):
            return True  # nobody else writes one
        # The end of a head that was lost is written by the next one.
        number, is_end = int(path.split("/")[1]), path.endswith("/end.json")
        attempts = [self.run.attempt(each) for each in range(number, number + 1 + is_end)]
        heads = [head_of(self.run, attempt) for attempt in attempts if attempt.start.exists()]
        if heads or not is_end:
            return self.node.node_rank in (heads or [self.head])
        others = (report for host, report in read_reports(self.run).items() if host != self.host)
        return self.is_head and not any(report.is_supervised and report.error is None for report in others)

    def _ranks_in(self, path: str) -> frozenset[int]:
        """Return the ranks that the host has in the attempt of a file."""
        if not self.is_elastic:
            return self.ranks
        # None before start.json is here: the next listing's files are then downloaded.
        attempt = self.run.attempt(int(path.split("/")[1]))
        if not attempt.start.exists():
            return frozenset()
        gang = read_gang(self.run, attempt)
        return frozenset(rank for node in gang.nodes if node.node_rank == self.node.node_rank for rank in node.ranks)

    def _wants(self, part: str, match: re.Match[str]) -> bool:
        found = match.groupdict()
        if "attempt" in found:
            ranks = {int(found["rank"])} if "rank" in found else self.ranks
            if ranks & self.wants.logs and int(found["attempt"]) >= (self.wants.first_attempt or 0):
                return True
        return self.wants.results and part in ("results", *self.fetch)


def find_host_runs(run: RunDir, report: Report = no_report) -> list[HostRun]:
    """Return the hosts of a run; none if it is not on SSH hosts, or its record is damaged.

    `report` receives the reason why the hosts of a run are not asked that is not this user's own.
    """
    try:
        record = read_run(run)
        if record.launcher != "ssh":
            return []
        from clusterddp.planning.ssh import SshPlan, directory_name

        plan = demand_sealed(run)
        ssh, gang = SshPlan.from_json(plan["ssh"]), Gang.from_json(plan["gang"])
    except ClusterddpError as error:
        report(error.message + (f"; {error.hint}" if error.hint else ""))
        return []
    except (OSError, TypeError, KeyError, ValueError, AttributeError):
        return []  # read_state reports what is wrong with it
    if gang.token != record.token or len(gang.nodes) != len(ssh.hosts):
        return []
    return [
        HostRun(
            run=run,
            name=directory_name(record.run, record.token),
            token=record.token,
            node=node,
            ranks=frozenset(slot.ranks if gang.min_nodes is None else range(gang.max_world_size)),
            is_elastic=gang.min_nodes is not None,
            fetch=ssh.fetch,
        )
        for node, slot in zip(ssh.hosts, gang.nodes, strict=True)
    ]


def head_of(run: RunDir, attempt: AttemptDir | None = None) -> int:
    """Return the node whose supervisor is the head in an attempt, by default in the newest one that has started."""
    if attempt is None:  # of this start of the run, with its hosts
        attempts = [each for each in run.attempts() if each.number >= read_run(run).base_attempt]
        attempt = next((each for each in reversed(attempts) if each.start.exists()), None)
    return read_gang(run, attempt).nodes[0].node_rank


def newest_attempt(run: RunDir, paths: Iterable[str] = ()) -> int:
    """Return the number of the newest attempt, here or among these paths on a host."""
    there = [int(path.split("/")[1]) for path in paths if _OF_ATTEMPT.match(path)]
    return max([*there, *(attempt.number for attempt in run.attempts())], default=0)


def checkpoints_among(files: Mapping[str, Listed]) -> tuple[str, ...]:
    """Return the names of the checkpoints, oldest first: by attempt, then by step."""
    found = [Path(path).stem for path in files if _MANIFEST.fullmatch(path)]
    return tuple(sorted(found, key=checkpoint_age))


def checkpoint_age(name: str) -> tuple[int, int]:
    """Return the attempt and the step of a checkpoint by its name."""
    match = _MANIFEST.fullmatch(f"checkpoints/{name}.json")
    return (int(match["attempt"]), int(match["step"])) if match else (-1, -1)


@contextlib.contextmanager
def locked(run: RunDir, what: str, timeout_s: float = _LOCK_S) -> Iterator[bool]:
    """Hold a lock on the local copy of a run; False: another process holds it after `timeout_s`.

    Raises: ClusterddpError: the file system refuses.
    """
    try:
        file = os.open(run.launcher_dir / f".{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritable(run, error) from error
    deadline, is_free = time.monotonic() + timeout_s, False
    try:
        while not is_free:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(_LOCK_POLL_S)
            except OSError:  # a file system without locks
                is_free = True
        yield is_free
    finally:
        os.close(file)  # which releases the lock


def unwritable(run: RunDir, error: OSError) -> ClusterddpError:
    return ClusterddpError(
        f"{error.filename or run.path}: the download cannot be written: {error.strerror}",
        hint="the run goes on and its hosts keep the files; the next command downloads them",
    )


def report_of(host_run: HostRun, answer: Mapping[str, Any], files: Mapping[str, Listed]) -> HostReport:
    """Return the report of a host that answered."""
    now = time.time()
    return HostReport(
        host=host_run.host,
        start=host_run.start,
        asked=now,
        reached=now,
        # One machine may be two hosts of a run, by two names; each reports its own node.
        alive=tuple(role for role in answer["alive"] if role[1:] == str(host_run.node.node_rank)),
        boot=str(answer["boot"]),
        has_run=bool(answer["has_run"]),
        end_attempt=answer["end_attempt"],
        end=answer["end"],
        checkpoints=checkpoints_among(files),
        last_output=_last_output(newest_attempt(host_run.run, files), files),
    )


def failure_of(host_run: HostRun, error: SshError) -> HostReport:
    """Return the report of a host that did not answer."""
    return HostReport(host=host_run.host, start=host_run.start, asked=time.time(), error=reason_of(error))


def reason_of(error: SshError) -> str:
    return error.found if error.phase in {"ask", "connect"} else f"{error.phase}: {error.found}"


def update_reports(run: RunDir, reports: Iterable[HostReport]) -> None:
    """Write the reports of some hosts; those of the other hosts stay.

    Raises: ClusterddpError: they cannot be written.
    """
    with locked(run, "hosts") as free:
        if not free:
            return  # another process writes reports
        before = read_reports(run)
        after = before | {report.host: _merged(before.get(report.host), report) for report in reports}
        if _must_write(before, after):
            write_reports(run, after.values())


def must_ask(host_run: HostRun, wants: Wants) -> bool:
    """Return whether a host has to be asked about a run now."""
    if wants.results:
        return _may_have_results(host_run)
    if wants.after_end or final_end(host_run.run) is None:
        record = read_run(host_run.run)
        submitter = ProcessIdentity.from_json(record.submitter) if record.submitter else None
        is_being_started = record.job_id is None and submitter is not None and submitter.alive()
        return not (record.queued or is_being_started)
    return bool(wants.logs & host_run.ranks) and ("logs" not in host_run.fetch or _may_have_results(host_run))


def is_unknown(run: RunDir, state: RunState) -> bool:
    """Return whether nothing is known of a run: no host has been reached since it was submitted."""
    if state is not RunState.UNKNOWN or not is_on_hosts(run):
        return False
    if any(attempt.start.exists() or attempt.end.exists() for attempt in run.attempts()):
        return False
    reports = read_reports(run).values()
    return any(report.error for report in reports) and not any(report.reached for report in reports)


def raise_if_unknown(run: RunDir, view: RunView, *, asked_s: float | None = None) -> None:
    """Refuse to go on with a run of which nothing is known; `asked_s`: for how many seconds its hosts were asked.

    Raises: PreflightError: `is_unknown`.
    """
    if is_unknown(run, view.state):
        asked = "" if asked_s is None else f"; its hosts were asked for {asked_s:.0f} s"
        raise PreflightError(f"{run.name}: {view.reason}{asked}")


def is_on_hosts(run: RunDir) -> bool:
    """Return whether a run was started on SSH hosts; False if its record cannot be read."""
    try:
        return (read_json(run.record) or {}).get("launcher") == "ssh"
    except (ClusterddpError, OSError, AttributeError):
        return False  # the command that reads it reports that


def _last_output(attempt: int, files: Mapping[str, Listed]) -> float | None:
    logs = f"attempts/{attempt}/logs/"
    own = {path: listed for path, listed in files.items() if path.startswith(logs) and not path.endswith(".times")}
    written_ns = [mtime_ns for size, mtime_ns in own.values() if size]
    return max(written_ns) / 1e9 if written_ns else None


def _may_have_results(host_run: HostRun) -> bool:
    """Return whether a host may have files of an ended run that were not downloaded yet."""
    if final_end(host_run.run) is not None and read_run(host_run.run).job_id is None:
        return False  # it was never started
    report = read_reports(host_run.run).get(host_run.host)
    return report is None or report.complete != newest_attempt(host_run.run)


def _merged(before: HostReport | None, new: HostReport) -> HostReport:
    """Return the report of a host; if it did not answer, its last answer stays."""
    if before is None:
        return new
    if new.error is not None:
        return dataclasses.replace(before, start=new.start, asked=new.asked, error=new.error)
    stays_complete = new.complete is None and not new.is_supervised
    return dataclasses.replace(new, complete=before.complete) if stays_complete else new


def _must_write(before: Mapping[str, HostReport], after: Mapping[str, HostReport]) -> bool:
    def without_times(reports: Mapping[str, HostReport]) -> list[HostReport]:
        return [
            dataclasses.replace(report, asked=0.0, reached=None, last_output=None)
            for _, report in sorted(reports.items())
        ]

    oldest = min((report.asked for report in before.values()), default=0.0)
    return without_times(before) != without_times(after) or time.time() - oldest > _QUIET_WRITE_S


def _is_safe(path: str) -> bool:
    """Return whether a name stays below the run's directory and is no hidden file, which are this machine's own."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return all(part and not part.startswith(".") and "\0" not in part for part in path.split("/"))
