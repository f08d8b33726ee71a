"""Synchronises the copies of runs on SSH hosts: downloads what is new there, so that it can be read here.

`launcher/hosts.json` says when each host was asked, and what it answered or why it could not be reached. A command that
watches a run keeps the connections, and asks about once a second; a host that is lost is tried again, and named once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.remote.download import ASK_TIMEOUT_S, Asks, Listed
from clusterddp.results.checkpoints import download_large
from clusterddp.results.download import download_records
from clusterddp.results.host_run import HostRun, Wants, find_host_runs, newest_attempt
from clusterddp.results.reports import failure_of, is_on_hosts, is_open, reason_of, report_of, write_news
from clusterddp.run.directory import RunDir
from clusterddp.run.host_reports import HostReport
from clusterddp.ssh.fan import EACH_S

if TYPE_CHECKING:
    from clusterddp.remote.session_pool import Open, SessionPool, Work
    from clusterddp.ssh.session import HostAccess

FIRST_ANSWER_S = 12.0
"""How long the first answers are waited for: hosts may have to be connected to."""
_ANSWER_S = 3.0
_PAUSE_S = 0.2
_LEAVE_S = 5.0
"""How long the last processes of a run may take to leave after its end, and still write what is downloaded."""

_RETURN_S = 15.0
"""After a host is back that was silent, so long may the others take: it was the network, and not one host."""


def _ignore(text: str) -> None:
    pass


@dataclass(kw_only=True, slots=True)
class _Visit:
    """What one host has answered about one run, and what was downloaded of it."""

    run: RunDir
    report: HostReport | None = None
    """None: its files were not downloaded, so what it says of its processes must not stand alone."""
    complete: bool = True
    """False: more is there."""
    problem: ClusterddpError | None = None
    notes: Sequence[str] = ()


@dataclass(kw_only=True, slots=True)
class _Listing:
    """The files that a host has listed before, so that it need not list them again."""

    total: str = ""
    files: dict[str, Listed] = field(default_factory=dict)


class Synchroniser:
    """Keeps the copies of runs up to date; a run that was not started on SSH hosts costs nothing."""

    def __init__(
        self,
        runs: Iterable[RunDir],
        environ: Mapping[str, str],
        *,
        say: Callable[[str], None] = _ignore,
        names_hosts: bool = True,
        interval_s: float = 1.0,
        open_session: Open | None = None,
    ) -> None:
        """Find the hosts of runs; they are asked again after `interval_s`.

        `say` is called with what is downloaded and what cannot be written here, and, with `names_hosts`, with the hosts
        that cannot be reached.
        """
        self._say = say
        self._names_hosts = names_hosts
        self._interval_s = interval_s
        self._host_runs: dict[HostAccess, list[HostRun]] = {}
        for run in filter(is_on_hosts, runs):
            for access, host_run in find_host_runs(run, say):
                self._host_runs.setdefault(access, []).append(host_run)
        self._sessions: SessionPool | None = None
        if self._host_runs:
            from clusterddp.remote.session_pool import Opener, SessionPool  # loads paramiko

            self._sessions = SessionPool(open_session or Opener(environ))
        self._wants = Wants()
        self._listings: dict[tuple[HostAccess, str], _Listing] = {}
        self._said: dict[str, str] = {}
        self._updated_at: float | None = None
        """Seconds of the monotonic clock; None: never."""
        self._is_behind = False
        self._silent: set[HostAccess] = set()
        self._returned_at = -math.inf
        """When a host answered that had been silent, in seconds of the monotonic clock."""

    def __enter__(self) -> Synchroniser:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._sessions is not None:
            self._sessions.close()

    def want_logs(self, ranks: Iterable[int], first_attempt: int | None) -> None:
        """Download the logs of these ranks, too, from an attempt on; None: of the newest one."""
        self._wants = Wants(logs=frozenset(ranks), first_attempt=first_attempt)

    def update(self, *, timeout_s: float | None = None) -> None:
        """Download what is new, unless that was just done; a host that does not answer in time is left out."""
        now = time.monotonic()
        is_first = self._updated_at is None
        if not is_first and not self._is_behind and now - (self._updated_at or 0.0) < self._interval_s:
            return
        works = self._choose_hosts(self._wants)
        answer_s = (timeout_s or (FIRST_ANSWER_S if is_first else _ANSWER_S)) + EACH_S * len(works)
        self._ask(works, answer_s, anew=False)

    def update_logs(self) -> None:
        """Download all that there is at this moment of the logs that are wanted, however long that takes."""
        while True:
            self._ask(self._choose_hosts(self._wants, only_logs=True), None, anew=True)
            if not self._is_behind:
                return

    def download(self) -> bool:
        """Download what the specs of these runs say, all of which have ended; False when a part could not be."""
        deadline = time.monotonic() + _LEAVE_S
        while works := self._choose_hosts(Wants(results=True, patient=time.monotonic() < deadline)):
            self._ask(works, None, anew=True)
            follow = self._silent & works.keys() and time.monotonic() < self._returned_at + _RETURN_S
            if not (self._is_behind or follow):
                return not self._choose_hosts(Wants(results=True))
            time.sleep(_PAUSE_S)
        return True

    def ask_hosts(self, run: RunDir, do: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any] | SshError]:
        """Ask the hosts of a run something, over the connections that are there already; empty: it has none."""

        def put(session: Asks) -> dict[str, Any]:
            return session.ask(do, facts, timeout_s=ASK_TIMEOUT_S).facts

        asked = [access for access, host_runs in self._host_runs.items() if any(each.run == run for each in host_runs)]
        timeout_s = FIRST_ANSWER_S + EACH_S * len(asked)
        results = self._run(do, dict.fromkeys(asked, put), timeout_s, anew=True)
        silent = f"no answer within {timeout_s:g} s"
        return {each.host: results.get(each, SshError(each.host, "ask", silent)) for each in asked}

    def _choose_hosts(self, wants: Wants, *, only_logs: bool = False) -> dict[HostAccess, list[HostRun]]:
        """Choose who is asked about which runs; `only_logs`: heads, and hosts of ranks whose logs are wanted."""
        works: dict[HostAccess, list[HostRun]] = {}
        for access, host_runs in self._host_runs.items():
            for host_run in host_runs:
                if only_logs and not (host_run.is_head or wants.logs & host_run.ranks):
                    continue
                # A run whose record is damaged, or is being removed, keeps no other from being updated.
                with contextlib.suppress(ClusterddpError, OSError, TypeError, KeyError, ValueError, AttributeError):
                    if is_open(host_run, wants):
                        works.setdefault(access, []).append(host_run.wanting(wants))
        return works

    def _run(
        self, kind: str, works: Mapping[HostAccess, Work], timeout_s: float | None, *, anew: bool
    ) -> dict[HostAccess, Any]:
        return self._sessions.run(kind, works, timeout_s, anew=anew) if self._sessions is not None else {}

    def _ask(self, works: Mapping[HostAccess, list[HostRun]], timeout_s: float | None, *, anew: bool) -> None:
        """Ask hosts for what is new, download it, and write down what they have reported."""
        is_first = self._updated_at is None
        visits = {access: functools.partial(self._visit, access, host_runs) for access, host_runs in works.items()}
        results = self._run("visit", visits, timeout_s, anew=anew)
        self._is_behind = False
        news: dict[RunDir, list[HostReport]] = {}
        for access, host_runs in works.items():
            result = results.get(access)
            if result is None and is_first:
                result = SshError(access.host, "connect", f"no answer within {timeout_s:g} s")
            if isinstance(result, SshError):
                self._silent.add(access)
                self._say_of(access.host, f"cannot be reached: {reason_of(result)}", result.hint)
                for host_run in host_runs:
                    news.setdefault(host_run.run, []).append(failure_of(host_run, result))
            elif result is not None:
                if access in self._silent:
                    self._silent.discard(access)
                    self._returned_at = time.monotonic()
                self._say_of(access.host, "", None)
                for visit in result:
                    self._take(visit, news)
        for run, reports in news.items():
            try:
                write_news(run, reports)
            except ClusterddpError as error:
                self._say_once("here", error.message, error.hint)
        self._updated_at = time.monotonic()

    def _take(self, visit: _Visit, news: dict[RunDir, list[HostReport]]) -> None:
        self._is_behind = self._is_behind or not visit.complete
        if visit.report is not None:
            news.setdefault(visit.run, []).append(visit.report)
        for note in visit.notes:
            self._say_once(note, note, None)
        if visit.problem is not None:
            self._say_once("here", visit.problem.message, visit.problem.hint)

    def _say_once(self, about: str, text: str, hint: str | None) -> None:
        """Say something, unless it was the last that was said about that."""
        before, self._said[about] = self._said.get(about, ""), text
        if text != before:
            self._say(text + (f" (hint: {' '.join(hint.split())})" if hint else ""))

    def _say_of(self, host: str, trouble: str, hint: str | None) -> None:
        """Say that a host has trouble, or, with none, that it is over."""
        if self._names_hosts and (trouble or host in self._said):
            self._say_once(host, f"{host} {trouble or 'answers again'}", hint)

    def _visit(self, access: HostAccess, host_runs: list[HostRun], session: Asks) -> list[_Visit]:
        """Ask a host for what is new of runs, and download it; in the host's own thread."""
        known = {each.name: self._listings.setdefault((access, each.name), _Listing()) for each in host_runs}
        asked = [{"name": each.name, "token": each.token, "seen": known[each.name].total} for each in host_runs]
        reply = session.ask("results.list", {"runs": asked}, timeout_s=ASK_TIMEOUT_S)
        visits = []
        for host_run in host_runs:
            answer, listing = reply.facts["runs"].get(host_run.name), known[host_run.name]
            if answer is None:
                raise NonsenseError(access.host, f"nothing of {host_run.name}")
            if answer["files"] is not None:
                listing.total, listing.files = answer["sum"], answer["files"]
            visits.append(self._download(session, host_run, answer, listing.files))
        return visits

    def _download(self, session: Asks, host_run: HostRun, answer: dict[str, Any], files: dict[str, Listed]) -> _Visit:
        host_run = host_run.wanting_from(newest_attempt(host_run.run, files))
        records = download_records(session, host_run, files)
        if records.problem or records.is_locked:
            return _Visit(run=host_run.run, problem=records.problem, complete=not records.is_locked)
        report = report_of(host_run, answer, files)
        visit = _Visit(run=host_run.run, report=report, complete=records.complete)
        if not host_run.wants.results or not records.complete:
            return visit
        large = download_large(session, host_run, files, self._say)
        visit.problem, visit.notes = large.problem, large.notes
        goes_on = not large.complete or (report.is_supervised and host_run.wants.patient)
        visit.complete = not goes_on or large.problem is not None
        if not goes_on:
            visit.report = dataclasses.replace(report, complete=newest_attempt(host_run.run))
        return visit


NO_HOSTS = Synchroniser((), {})
"""For runs whose files lie here."""
