"""Synchronises the local copies of runs on SSH hosts: downloads what is new on the hosts.

`launcher/hosts.json` records when each host was asked, and its answer or the reason why it could not be reached. A
command that watches a run keeps the connections and asks once a second; it retries a lost host and reports it once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, NonsenseError, SshError
from clusterddp.places.base import Report, no_report
from clusterddp.places.ssh.connections import EACH_S
from clusterddp.places.ssh.download import ASK_TIMEOUT_S, download
from clusterddp.places.ssh.host_run import (
    HostReport,
    HostRun,
    Listed,
    Wants,
    failure_of,
    find_host_runs,
    head_of,
    is_on_hosts,
    must_ask,
    newest_attempt,
    reason_of,
    report_of,
    update_reports,
)
from clusterddp.run.attempts import final_end
from clusterddp.run.directory import RunDir

if TYPE_CHECKING:
    from clusterddp.places.ssh.session import Session
    from clusterddp.places.ssh.sessions import Open, SessionPool, Work
    from clusterddp.planning.ssh import SshNode

FIRST_ANSWER_S = 12.0
"""How long the first answers may take; they include the time to connect."""
_ANSWER_S = 3.0
_PAUSE_S = 0.2
_MAX_PARTS = 16
"""In how many parts a host may list the files of a run."""
_EXIT_S = 5.0
"""How long the last processes of a run may take to exit after its end; until then they may write results."""
_RETURN_S = 15.0
"""How long after one host answers again the others may take: all of them may have lost the same network."""


@dataclass(kw_only=True, slots=True)
class _Result:
    """What one host has answered about one run, and what was downloaded of it."""

    run: RunDir
    report: HostReport | None = None
    """None: its files were not downloaded, so its report is not recorded either."""
    goes_on: bool = False
    """True: the host has more."""
    problem: ClusterddpError | None = None


class Synchroniser(contextlib.AbstractContextManager["Synchroniser"]):
    """Keeps the local copies of runs up to date; for runs that are not on SSH hosts it does nothing."""

    def __init__(
        self,
        runs: Iterable[RunDir],
        environ: Mapping[str, str],
        *,
        report: Report = no_report,
        names_hosts: bool = True,
        interval_s: float = 1.0,
        open_session: Open | None = None,
    ) -> None:
        """Find the hosts of runs; `update` asks them at most every `interval_s`.

        `report` receives what is downloaded, what cannot be written and, with `names_hosts`, which hosts cannot be
        reached.
        """
        self._report = report
        self._names_hosts = names_hosts
        self._interval_s = interval_s
        self._host_runs: dict[SshNode, list[HostRun]] = {}
        for run in filter(is_on_hosts, runs):
            for host_run in find_host_runs(run, report):
                self._host_runs.setdefault(host_run.node, []).append(host_run)
        self._sessions: SessionPool | None = None
        if self._host_runs:
            from clusterddp.places.ssh.connections import Connector
            from clusterddp.places.ssh.sessions import SessionPool

            self._sessions = SessionPool(open_session or Connector(environ).open)
        self._wants = Wants()
        self._listings: dict[tuple[SshNode, str], dict[str, Listed]] = {}
        """The last list of files of a run from a host, which sends another only when it has changed."""
        self._reported: dict[str, str] = {}
        """The last message by subject."""
        self._updated_at: float | None = None
        """Seconds of the monotonic clock; None: never."""
        self._is_behind = False
        self._unreached: set[SshNode] = set()
        self._returned_at = -math.inf
        """When a host last answered again, in seconds of the monotonic clock."""

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._sessions is not None:
            self._sessions.close()

    @property
    def has_hosts(self) -> bool:
        return bool(self._host_runs)

    def want_logs(self, ranks: Iterable[int], first_attempt: int | None, tails: tuple[Path, int] | None = None) -> None:
        """Download logs of these ranks, too, from `first_attempt` on; None: the newest one; `tails`: see `Wants`."""
        self._wants = Wants(logs=frozenset(ranks), first_attempt=first_attempt, tails=tails)

    def update(self, *, timeout_s: float | None = None, after_end: bool = False) -> None:
        """Download what is new, at most every `interval_s`; hosts that do not answer in time are left out.

        `after_end`: also of runs that have ended, whose hosts may still send a message.
        """
        now = time.monotonic()
        is_first = self._updated_at is None
        if not is_first and not self._is_behind and now - (self._updated_at or 0.0) < self._interval_s:
            return
        works = self._choose_hosts(dataclasses.replace(self._wants, after_end=after_end))
        answer_s = (timeout_s or (FIRST_ANSWER_S if is_first else _ANSWER_S)) + EACH_S * len(works)
        self._ask(works, answer_s, anew=False)

    def update_logs(self) -> None:
        """Download the wanted logs up to their current ends, without a timeout."""
        while True:
            self._ask(self._choose_hosts(self._wants, only_logs=True), None, anew=True)
            if not self._is_behind:
                return

    def download(self) -> bool:
        """Download the results of these runs, all of which have ended; False if a part could not be downloaded."""
        deadline = time.monotonic() + _EXIT_S
        while works := self._choose_hosts(Wants(results=True, while_supervised=time.monotonic() < deadline)):
            self._ask(works, None, anew=True)
            may_return = self._unreached & works.keys() and time.monotonic() < self._returned_at + _RETURN_S
            if not (self._is_behind or may_return):
                return not self._choose_hosts(Wants(results=True))
            time.sleep(_PAUSE_S)
        return True

    def ask_hosts(self, run: RunDir, do: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any] | SshError]:
        """Send a request to the hosts of a run over the open connections; host -> its answer, empty without hosts."""

        def ask(session: Session) -> dict[str, Any]:
            return session.ask(do, facts, timeout_s=ASK_TIMEOUT_S).facts

        asked = [node for node, host_runs in self._host_runs.items() if any(each.run == run for each in host_runs)]
        timeout_s = FIRST_ANSWER_S + EACH_S * len(asked)
        results = self._run(do, dict.fromkeys(asked, ask), timeout_s, anew=True)
        reason = f"no answer within {timeout_s:g} s"
        return {each.host: results.get(each, SshError(each.host, "ask", reason)) for each in asked}

    def _choose_hosts(self, wants: Wants, *, only_logs: bool = False) -> dict[SshNode, list[HostRun]]:
        """Choose which hosts are asked about which runs; `only_logs`: heads, and hosts of ranks with wanted logs."""
        works: dict[SshNode, list[HostRun]] = {}
        for node, host_runs in self._host_runs.items():
            for host_run in host_runs:
                # A run whose record is damaged, or that is being removed, must not stop the others.
                with contextlib.suppress(ClusterddpError, OSError, TypeError, KeyError, ValueError, AttributeError):
                    wanting = host_run.wanting(wants)
                    if only_logs and not (wanting.is_head or wants.logs & host_run.ranks):
                        continue
                    if must_ask(host_run, wants):
                        works.setdefault(node, []).append(wanting)
        return works

    def _run(
        self, kind: str, works: Mapping[SshNode, Work], timeout_s: float | None, *, anew: bool
    ) -> dict[SshNode, Any]:
        return self._sessions.run(kind, works, timeout_s, anew=anew) if self._sessions is not None else {}

    def _ask(self, works: Mapping[SshNode, list[HostRun]], timeout_s: float | None, *, anew: bool) -> None:
        """Ask hosts for what is new, download it, and write their reports."""
        is_first = self._updated_at is None
        asks = {node: functools.partial(self._ask_host, node, host_runs) for node, host_runs in works.items()}
        answers = self._run("update", asks, timeout_s, anew=anew)
        self._is_behind = False
        reports: dict[RunDir, list[HostReport]] = {}
        for node, host_runs in works.items():
            answer = answers.get(node)
            if answer is None and is_first:
                answer = SshError(node.host, "connect", f"no answer within {timeout_s:g} s")
            if isinstance(answer, SshError):
                self._unreached.add(node)
                self._report_host(node.host, f"cannot be reached: {reason_of(answer)}", answer.hint)
                for host_run in host_runs:
                    reports.setdefault(host_run.run, []).append(failure_of(host_run, answer))
            elif answer is not None:
                if node in self._unreached:
                    self._unreached.discard(node)
                    self._returned_at = time.monotonic()
                    assert self._sessions is not None
                    self._sessions.retry_now()
                self._report_host(node.host, "", None)
                for result in answer:
                    self._take(result, reports)
        for run, of_run in reports.items():
            try:
                update_reports(run, of_run)
            except ClusterddpError as error:
                self._report_once("here", error.message, error.hint)
        self._updated_at = time.monotonic()

    def _take(self, result: _Result, reports: dict[RunDir, list[HostReport]]) -> None:
        self._is_behind = self._is_behind or result.goes_on
        if result.report is not None:
            reports.setdefault(result.run, []).append(result.report)
        if result.problem is not None:
            self._report_once("here", result.problem.message, result.problem.hint)

    def _report_once(self, subject: str, text: str, hint: str | None) -> None:
        """Report a message, unless it was the last one on this subject."""
        before, self._reported[subject] = self._reported.get(subject, ""), text
        if text != before:
            self._report(text + (f" (hint: {' '.join(hint.split())})" if hint else ""))

    def _report_host(self, host: str, problem: str, hint: str | None) -> None:
        """Report the problem of a host, or, if it is empty, that an earlier one is over."""
        if self._names_hosts and (problem or host in self._reported):
            self._report_once(host, f"{host} {problem or 'answers again'}", hint)

    def _ask_host(self, node: SshNode, host_runs: list[HostRun], session: Session) -> list[_Result]:
        """Ask a host for what is new of runs, and download it; runs in the host's own thread."""
        asked = [
            {"name": each.name, "token": each.token, "begin": 0, "rejoins": each.is_elastic and not final_end(each.run)}
            for each in host_runs
        ]
        reply = session.ask("run.look", {"runs": asked}, timeout_s=ASK_TIMEOUT_S)
        results = []
        for host_run in host_runs:
            answer = reply.facts["runs"].get(host_run.name)
            if answer is None:
                raise NonsenseError(node.host, f"nothing of {host_run.name}")
            if answer["files"] is not None:
                self._listings[node, host_run.name] = _read_list(session, host_run, answer)
            files = self._listings.get((node, host_run.name), {})
            wanting = host_run.wanting_from(newest_attempt(host_run.run, files))
            done = download(session, wanting, files, self._report)
            if wanting.is_elastic and (head := head_of(host_run.run)) != wanting.head:  # its start.json has come
                done = download(session, dataclasses.replace(wanting, head=head), files, self._report)
            result = _Result(run=host_run.run, goes_on=done.goes_on, problem=done.problem)
            if done.has_records:
                result.report = report_of(wanting, answer, files)
                if wanting.wants.results and done.is_complete:
                    if result.report.is_supervised and wanting.wants.while_supervised:
                        result.goes_on = True
                    else:
                        result.report = dataclasses.replace(result.report, complete=newest_attempt(host_run.run))
            results.append(result)
        return results


def _read_list(session: Session, host_run: HostRun, answer: Mapping[str, Any]) -> dict[str, Listed]:
    """Read the list of a run's files, which a host sends in parts."""
    files: dict[str, Listed] = {}
    for _ in range(_MAX_PARTS):
        files |= answer["files"] or {}
        if not answer["more"]:
            return files
        asked = {"name": host_run.name, "token": host_run.token, "begin": len(files), "rejoins": False}
        runs = session.ask("run.look", {"runs": [asked]}, timeout_s=ASK_TIMEOUT_S).facts["runs"]
        answer = runs.get(host_run.name) or {"files": None, "more": False}
    raise NonsenseError(session.host, f"more than {len(files):,} files of {host_run.name}")


NO_HOSTS = Synchroniser((), {})
"""For runs without remote files."""
