"""Keeps the files of runs as new as can be for whoever reads them: of runs on SSH hosts they are brought home first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.run.directory import RunDir, read_json
from clusterddp.run.view import RunState, RunView


class Home(Protocol):
    """Where the files of runs are read; what hosts have is brought there."""

    def look(self, *, timeout_s: float | None = None) -> None:
        """Bring home what is new, unless that was just done; who does not answer in time is left out."""

    def want_logs(self, ranks: Iterable[int], first_attempt: int | None) -> None:
        """Bring home the logs of these ranks, too, from an attempt on; None: of the newest one."""

    def catch_up(self) -> None:
        """Bring home all that there is at this moment of the logs that are wanted, however long that takes."""

    def fetch(self) -> bool:
        """Fetch what the specs of these runs say, all of which have ended; False when not all of it could be."""

    def ask(self, run: RunDir, do: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any] | SshError]:
        """Ask the hosts of a run something, over the connections that are there already; none: nobody to ask."""


class _AllHere:
    """The files are written where they are read."""

    def look(self, *, timeout_s: float | None = None) -> None:
        pass

    def want_logs(self, ranks: Iterable[int], first_attempt: int | None) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def fetch(self) -> bool:
        return True

    def ask(self, run: RunDir, do: str, facts: Mapping[str, Any]) -> dict[str, dict[str, Any] | SshError]:
        return {}


ALL_HERE: Home = _AllHere()


@contextlib.contextmanager
def kept_fresh(
    runs: Iterable[RunDir],
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None] = lambda text: None,
    names_hosts: bool = True,
    interval_s: float = 1.0,
) -> Iterator[Home]:
    """Keep runs as their hosts know them, while the block lasts; hosts are asked again after `interval_s`.

    `say` hears what is fetched and what cannot be written here, and, with `names_hosts`, who cannot be reached.
    """
    elsewhere = [run for run in runs if _is_on_hosts(run)]
    if not elsewhere:
        yield ALL_HERE
        return
    from clusterddp.results.mirror import Mirror

    mirror = Mirror(elsewhere, environ, say=say, names_hosts=names_hosts, interval_s=interval_s)
    try:
        yield mirror
    finally:
        mirror.close()


def is_out_of_sight(run: RunDir, state: RunState) -> bool:
    """Say whether nothing is known of a run: its hosts cannot be reached, and none was since it was submitted."""
    if state is not RunState.UNKNOWN or not _is_on_hosts(run):
        return False
    from clusterddp.results.told import was_never_reached

    return was_never_reached(run)


def demand_sight(run: RunDir, view: RunView, *, asked_s: float | None = None) -> None:
    """See to it that something is known of a run; `asked_s`: for how long its hosts were asked again and again.

    Raises: PreflightError: it is out of sight.
    """
    if is_out_of_sight(run, view.state):
        asked = "" if asked_s is None else f"; its hosts were asked for {asked_s:.0f} s"
        raise PreflightError(f"{run.name}: {view.reason}{asked}")


def _is_on_hosts(run: RunDir) -> bool:
    try:
        return (read_json(run.record) or {}).get("launcher") == "ssh"
    except (ClusterddpError, OSError, AttributeError):
        return False  # who reads it says so
