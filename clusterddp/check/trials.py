"""Trials of hosts over SSH: each computes, and talks with one other host, by torch as the ranks of a run do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import SshError
from clusterddp.facts.trial import PairTrial, Trials
from clusterddp.ssh.fan import AT_ONCE, Fan
from clusterddp.ssh.session import Session

_START_S = 60.0
"""How long importing torch and computing may take."""
_TALK_S = 15.0
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """Where a host stands in a trial."""

    interface: str | None
    address: str
    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES; none: it computes on the CPU."""


@dataclass(kw_only=True)
class Tryout:
    """Runs trials on hosts and keeps what came of them."""

    sessions: Mapping[str, Session]
    grounds: Mapping[str, Ground]
    backend: str
    variables: Mapping[str, str]
    trials: Trials

    def run(self, pairs: Iterable[tuple[str, ...]]) -> None:
        """Let these pairs, of which no two have a host in common, talk at the same time; one host alone computes."""
        for pair_trial in Fan(list(pairs), self._try, lambda result: None).results(AT_ONCE).values():
            if pair_trial is not None:
                self.trials.pairs.append(pair_trial)

    def _try(self, hosts: tuple[str, ...]) -> PairTrial | None:
        talks = [_Talk(self.sessions[host], self.trials) for host in hosts]
        try:
            for rank, talk in enumerate(talks):
                talk.start(self._order(hosts, rank), self._variables(talk.host))
            if len(talks) == 1:
                talks[0].await_word("compute", _START_S)
                return None
            return self._let_talk(talks[0], talks[1])
        except (SshError, _TrialError) as error:
            words = error.found if isinstance(error, SshError) else str(error)
            if len(hosts) == 1:
                self.trials.failed[hosts[0]] = words
                return None
            return PairTrial(hosts=(hosts[0], hosts[1]), error=words)
        finally:
            for talk in talks:
                with contextlib.suppress(SshError):
                    talk.session.ask("trial.stop")

    def _let_talk(self, first: _Talk, second: _Talk) -> PairTrial:
        port = first.await_word("port", _START_S)
        second.tell({"port": port})
        links = [talk.await_word("link", _START_S + _TALK_S) for talk in (first, second)]
        return PairTrial(
            hosts=(first.host, second.host),
            mbyte_per_s=min(link["mbyte_per_s"] for link in links),
            latency_ms=max(link["latency_ms"] for link in links),
        )

    def _order(self, hosts: Sequence[str], rank: int) -> dict[str, Any]:
        address = self.grounds[hosts[0]].address
        pair = {"rank": rank, "address": address, "timeout_s": _TALK_S} if len(hosts) > 1 else None
        host = hosts[rank]
        return {
            "compute": host not in self.trials.compute_ms,
            "gpus": len(self.grounds[host].gpus),
            "pair": pair,
            "backend": self.backend,
        }

    def _variables(self, host: str) -> dict[str, str]:
        ground = self.grounds[host]
        found = {"CUDA_VISIBLE_DEVICES": ",".join(ground.gpus)}
        if ground.interface:
            found["GLOO_SOCKET_IFNAME"] = ground.interface
            if not ground.interface.startswith("lo"):
                found["NCCL_SOCKET_IFNAME"] = f"={ground.interface}"
        return found | dict(self.variables)


class _TrialError(Exception):
    """A trial has failed; the message says why."""


class _Talk:
    """One host of a trial."""

    def __init__(self, session: Session, trials: Trials) -> None:
        self.session = session
        self.host = session.host
        self._trials = trials
        self._said: dict[str, Any] = {}

    def start(self, order: dict[str, Any], variables: dict[str, str]) -> None:
        self.session.ask("trial.start", {"order": order, "variables": variables})

    def tell(self, words: dict[str, Any]) -> None:
        self.session.ask("trial.tell", {"words": words})

    def await_word(self, word: str, within_s: float) -> Any:
        """Wait until the host has said something.

        Raises: _TrialError, SshError.
        """
        deadline = time.monotonic() + within_s
        while word not in self._said:
            if time.monotonic() > deadline:
                raise _TrialError(f"{self.host}: no {word} within {within_s:.0f} s")
            answer = self.session.ask("trial.read", {"wait_s": _POLL_S}).facts
            for said in answer["said"]:
                self._said |= said
            if "compute" in self._said:
                self._trials.compute_ms[self.host] = self._said["compute"]
            if "error" in self._said:
                raise _TrialError(f"{self.host}: {self._said['error']}")
            if answer["ended"] is not None and word not in self._said:
                raise _TrialError(f"{self.host}: {answer['ended']}")
        return self._said[word]
