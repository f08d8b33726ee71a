"""Brings home what the hosts of ssh runs know of them, so that everybody can read it in the run's directory.

`launcher/hosts.json` says when each host was asked, and what it said or why it could not be reached. Whoever watches
keeps the connections, and asks about once a second; a host that is lost is tried again, and said to be once.
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
from clusterddp.remote.links import Links, Open
from clusterddp.remote.opener import Opener
from clusterddp.results.fetch import fetch
from clusterddp.results.pull import ASK_TIMEOUT_S, Asks, Told, pull
from clusterddp.results.target import Target, Wants, find_targets, newest_attempt
from clusterddp.results.told import failure_of, is_open, record, report_of, words_of
from clusterddp.run.directory import RunDir
from clusterddp.run.host_reports import HostReport
from clusterddp.ssh.fan import EACH_S

if TYPE_CHECKING:
    from clusterddp.ssh.session import HostAccess

FIRST_LOOK_S = 12.0
"""How long the first answers are waited for: hosts may have to be connected to."""
_LOOK_S = 3.0
_PAUSE_S = 0.2
_LEAVE_S = 5.0
"""How long the last of a run may take to leave after its end, and still write what is fetched."""

_RETURN_S = 15.0
"""After a host is back that was silent, so long may the others take: it was the network, and not one host."""

Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    """Keep it to oneself."""


@dataclass(kw_only=True, slots=True)
class _Visit:
    """What one host told of one run, and what became of it here."""

    run: RunDir
    report: HostReport | None = None
    """None: its files did not come home, so what it says of its processes must not stand alone."""
    behind: bool = False
    problem: ClusterddpError | None = None
    notes: Sequence[str] = ()


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What a host has told before, so that it need not be told again."""

    total: str = ""
    files: dict[str, Told] = field(default_factory=dict)


class Mirror:
    """Some runs, kept as their hosts know them; a run of another launcher, or all of which is here, costs nothing."""

    def __init__(
        self,
        runs: Iterable[RunDir],
        environ: Mapping[str, str],
        *,
        say: Say = say_nothing,
        names_hosts: bool = True,
        interval_s: float = 1.0,
        open_session: Open | None = None,
    ) -> None:
        """`say` hears what is fetched and what cannot be written here, and, with `names_hosts`, who does not answer."""
        self._say = say
        self._names_hosts = names_hosts
        self._interval_s = interval_s
        self._links = Links(open_session or Opener(environ))
        self._targets: dict[HostAccess, list[Target]] = {}
        for run in runs:
            for access, target in find_targets(run, say):
                self._targets.setdefault(access, []).append(target)
        self._wants = Wants()
        self._seen: dict[tuple[HostAccess, str], _Seen] = {}
        self._said: dict[str, str] = {}
        self._looked_at: float | None = None
        """Seconds of the monotonic clock; None: never."""
        self._behind = False
        self._silent: set[HostAccess] = set()
        self._returned_at = -math.inf
        """When a host answered that had been silent, in seconds of the monotonic clock."""

    def want_logs(self, ranks: Iterable[int], first_attempt: int | None) -> None:
        """Bring home the logs of these ranks, too, from an attempt on; None: of the newest one."""
        self._wants = Wants(logs=frozenset(ranks), first_attempt=first_attempt)

    def look(self, *, timeout_s: float | None = None) -> None:
        """Bring home what is new, unless that was just done; who does not answer in time is left out."""
        now = time.monotonic()
        is_first = self._looked_at is None
        if not is_first and not self._behind and now - (self._looked_at or 0.0) < self._interval_s:
            return
        works = self._works(self._wants)
        patience_s = (timeout_s or (FIRST_LOOK_S if is_first else _LOOK_S)) + EACH_S * len(works)
        self._look_once(works, patience_s, anew=False)

    def catch_up(self) -> None:
        """Bring home all that there is at this moment of the logs that are wanted, however long that takes."""
        while True:
            self._look_once(self._works(self._wants, whose_logs=True), None, anew=True)
            if not self._behind:
                return

    def fetch(self) -> bool:
        """Fetch what the specs of these runs say, all of which have ended; False when not all of it could be."""
        deadline = time.monotonic() + _LEAVE_S
        while works := self._works(Wants(results=True, patient=time.monotonic() < deadline)):
            self._look_once(works, None, anew=True)
            follow = self._silent & works.keys() and time.monotonic() < self._returned_at + _RETURN_S
            if not (self._behind or follow):
                return not self._works(Wants(results=True))
            time.sleep(_PAUSE_S)
        return True

    def ask(self, run: RunDir, do: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any] | SshError]:
        """Ask the hosts of a run something, over the connections that are there already; none: nobody to ask."""

        def put(session: Asks) -> dict[str, Any]:
            return session.ask(do, facts, timeout_s=ASK_TIMEOUT_S).facts

        asked = [access for access, targets in self._targets.items() if any(each.run == run for each in targets)]
        timeout_s = FIRST_LOOK_S + EACH_S * len(asked)
        results = self._links.run(do, dict.fromkeys(asked, put), timeout_s, anew=True)
        silent = f"no answer within {timeout_s:g} s"
        return {each.host: results.get(each, SshError(each.host, "ask", silent)) for each in asked}

    def close(self) -> None:
        self._links.close()

    def _works(self, wants: Wants, *, whose_logs: bool = False) -> dict[HostAccess, list[Target]]:
        """Choose who is asked about which runs; `whose_logs`: only heads, and hosts of ranks whose logs are wanted."""
        works: dict[HostAccess, list[Target]] = {}
        for access, targets in self._targets.items():
            for target in targets:
                if whose_logs and not (target.is_head or wants.logs & target.ranks):
                    continue
                # A run whose record is damaged, or is being removed, keeps no other from being looked at.
                with contextlib.suppress(ClusterddpError, OSError, TypeError, KeyError, ValueError, AttributeError):
                    if is_open(target, wants):
                        works.setdefault(access, []).append(target.wanting(wants))
        return works

    def _look_once(self, works: Mapping[HostAccess, list[Target]], timeout_s: float | None, *, anew: bool) -> None:
        is_first = self._looked_at is None
        results = self._links.run(
            "visit",
            {access: functools.partial(self._visit, access, targets) for access, targets in works.items()},
            timeout_s,
            anew=anew,
        )
        self._behind = False
        reports: dict[RunDir, list[HostReport]] = {}
        for access, targets in works.items():
            result = results.get(access)
            if result is None and is_first:
                result = SshError(access.host, "connect", f"no answer within {timeout_s:g} s")
            if isinstance(result, SshError):
                self._silent.add(access)
                self._tell_of(access.host, f"cannot be reached: {words_of(result)}", result.hint)
                for target in targets:
                    reports.setdefault(target.run, []).append(failure_of(target, result))
            elif result is not None:
                if access in self._silent:
                    self._silent.discard(access)
                    self._returned_at = time.monotonic()
                self._tell_of(access.host, "", None)
                for visit in result:
                    self._take(visit, reports)
        for run, news in reports.items():
            try:
                record(run, news)
            except ClusterddpError as error:
                self._tell("here", error.message, error.hint)
        self._looked_at = time.monotonic()

    def _take(self, visit: _Visit, reports: dict[RunDir, list[HostReport]]) -> None:
        self._behind = self._behind or visit.behind
        if visit.report is not None:
            reports.setdefault(visit.run, []).append(visit.report)
        for note in visit.notes:
            self._tell(note, note, None)
        if visit.problem is not None:
            self._tell("here", visit.problem.message, visit.problem.hint)

    def _tell(self, about: str, text: str, hint: str | None) -> None:
        """Say something, unless it was the last that was said about that."""
        before, self._said[about] = self._said.get(about, ""), text
        if text != before:
            self._say(text + (f" (hint: {' '.join(hint.split())})" if hint else ""))

    def _tell_of(self, host: str, trouble: str, hint: str | None) -> None:
        """Say that a host has trouble, or, with none, that it is over."""
        if self._names_hosts and (trouble or host in self._said):
            self._tell(host, f"{host} {trouble or 'answers again'}", hint)

    def _visit(self, access: HostAccess, targets: list[Target], session: Asks) -> list[_Visit]:
        """Ask a host for what is new of runs, and bring it home; in the host's own thread."""
        seen = {target.name: self._seen.setdefault((access, target.name), _Seen()) for target in targets}
        asked = [{"name": t.name, "token": t.token, "seen": seen[t.name].total} for t in targets]
        reply = session.ask("mirror.changes", {"runs": asked}, timeout_s=ASK_TIMEOUT_S)
        visits = []
        for target in targets:
            told, known = reply.facts["runs"].get(target.name), seen[target.name]
            if told is None:
                raise NonsenseError(access.host, f"nothing of {target.name}")
            if told["files"] is not None:
                known.total = told["sum"]
                known.files = told["files"]
            visits.append(self._bring_home(session, target, told, known.files))
        return visits

    def _bring_home(self, session: Asks, target: Target, told: dict[str, Any], files: dict[str, Told]) -> _Visit:
        target = target.wanting_from(newest_attempt(target.run, files))
        pulled = pull(session, target, files)
        if pulled.problem or pulled.untouched:
            return _Visit(run=target.run, problem=pulled.problem, behind=pulled.untouched)
        report = report_of(target, told, files)
        visit = _Visit(run=target.run, report=report, behind=pulled.behind)
        if not target.wants.results or pulled.behind:
            return visit
        fetched = fetch(session, target, files, self._say)
        visit.problem, visit.notes = fetched.problem, fetched.notes
        goes_on = not fetched.complete or (report.answers and target.wants.patient)
        visit.behind = goes_on and fetched.problem is None
        if not goes_on:
            visit.report = dataclasses.replace(report, complete=newest_attempt(target.run))
        return visit
