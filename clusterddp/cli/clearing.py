"""What gc does: sees what is left over on machines, shows it, ends and removes it, and says what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterddp.cli.ps_text import (
    failure_json,
    failure_lines,
    process_lines,
    run_json,
    spell_processes,
    stored_lines,
)
from clusterddp.cli.terminal import say, say_error
from clusterddp.errors import ClusterddpError, PreflightError, SshError
from clusterddp.look.printable import printable
from clusterddp.system.byte_sizes import format_bytes

if TYPE_CHECKING:
    from clusterddp.look.ps import Machines
    from clusterddp.run.leftovers import Ended, RunHere
    from clusterddp.run.stored import Removed, Storage


@dataclass(kw_only=True)
class Clearing:
    """One clearing of machines; `look` comes first, then `carry_out`, if somebody wants it."""

    machines: Machines
    tokens: list[str] | None
    """The runs that it is about; None: all."""
    older_than_s: float | None
    """What old directories are; None: none is removed."""
    put: Callable[[str], object]
    """Where to say what there is and what became of it: `say` where a script reads standard output."""
    found: Mapping[str, list[RunHere] | SshError] = field(default_factory=dict)
    storages: Mapping[str, Storage | SshError] = field(default_factory=dict)
    ended: Mapping[str, list[Ended] | SshError] = field(default_factory=dict)
    removed: Mapping[str, list[Removed] | SshError] = field(default_factory=dict)

    @property
    def left_over(self) -> dict[str, list[RunHere]]:
        """What nobody answers for, by machine; machines without are left out."""
        runs = {
            host: [run for run in runs if run.answered_by is None]
            for host, runs in self.found.items()
            if not isinstance(runs, SshError)
        }
        return {host: of_host for host, of_host in runs.items() if of_host}

    @property
    def removable(self) -> dict[str, list[str]]:
        """The places that can be removed, by machine; machines without are left out."""
        places = {
            host: [each.place for each in storage.removable]
            for host, storage in self.storages.items()
            if not isinstance(storage, SshError)
        }
        return {host: of_host for host, of_host in places.items() if of_host}

    @property
    def question(self) -> str:
        """What is to be done, as a question; empty when there is nothing."""
        processes = sum(len(run.processes) for runs in self.left_over.values() for run in runs)
        count = sum(map(len, self.removable.values()))
        size = sum(
            each.size
            for storage in self.storages.values()
            if not isinstance(storage, SshError)
            for each in storage.removable
        )
        words = [f"end {spell_processes(processes)}"] if processes else []
        if count:
            words.append(f"remove {_directories(count)} ({format_bytes(size)})")
        return " and ".join(words).capitalize() + "?" if words else ""

    @property
    def exit_code(self) -> int:
        answers = [*self.found.values(), *self.storages.values(), *self.ended.values(), *self.removed.values()]
        if any(isinstance(answer, SshError) for answer in answers):
            return PreflightError.exit_code
        failed = [ended for answer in self.ended.values() if not isinstance(answer, SshError) for ended in answer]
        kept = [removed for answer in self.removed.values() if not isinstance(answer, SshError) for removed in answer]
        is_clear = not any(ended.left for ended in failed) and not any(removed.error for removed in kept)
        return 0 if is_clear else ClusterddpError.exit_code

    def look(self) -> None:
        """See what is left over and what can be removed."""
        self.found = self.machines.look(self.tokens)
        if self.older_than_s is not None:
            self.storages = self.machines.stored(self.older_than_s)

    def carry_out(self) -> None:
        """End and remove what was found, as far as the same is still true of it."""
        left_over = {host: [run.token for run in runs] for host, runs in self.left_over.items()}
        self.ended = self.machines.end(left_over)
        if self.older_than_s is not None:
            self.removed = self.machines.remove(self.removable, self.older_than_s)

    def lines(self) -> list[str]:
        """Lay out what is to be ended and removed, and which machines could not be asked."""
        runs = process_lines(self.left_over) if self.left_over else []
        return [*runs, *stored_lines(self.storages), *failure_lines({**self.storages, **self.found})]

    def say_what_stays(self) -> None:
        """Say what this does not touch, though somebody may expect it to."""
        for host, runs in self.left_over.items():
            for run in runs:
                say_unmarked(host, run)
        for host, storage in self.storages.items():
            if not isinstance(storage, SshError) and storage.unfinished:
                say(
                    f"{printable(host)}: no end is recorded of {printable(', '.join(storage.unfinished))}: left alone; "
                    f"they lie in {printable(storage.root)}/runs"
                )

    def tell(self) -> None:
        """Say what became of everything that was to be ended or removed."""
        for host, runs in self.left_over.items():
            answer = self.ended[host]
            if isinstance(answer, SshError):
                say_error(answer.message, hint=answer.hint)
                continue
            labels = {run.token: run.label for run in runs}
            for ended in answer:
                self._tell_ended(host, labels[ended.token], ended)
        for host, removed in self.removed.items():
            if isinstance(removed, SshError):
                say_error(removed.message, hint=removed.hint)
                continue
            gone = [each for each in removed if each.error is None]
            if gone:
                self.put(
                    f"{_directories(len(gone))} removed on {printable(host)}, {format_bytes(sum(e.size for e in gone))}"
                )
            for each in removed:
                if each.error is not None:
                    say_error(f"{host}: {each.place} stays: {each.error}")

    def to_json(self) -> dict[str, Any]:
        """Describe it for scripts."""
        return {"hosts": [self._host_json(host, runs) for host, runs in self.found.items()]}

    def _host_json(self, host: str, runs: list[RunHere] | SshError) -> dict[str, Any]:
        answers = (runs, self.storages.get(host), self.ended.get(host), self.removed.get(host))
        error = next((answer for answer in answers if isinstance(answer, SshError)), None)
        if error is not None:
            return failure_json(host, error)
        left_over = self.left_over.get(host, [])
        names = {run.token: (run.run, run.token[:8]) for run in left_over}
        return {
            "host": host,
            "ok": True,
            "left_over": [run_json(run) for run in left_over],
            "ended": [_ended_json(*names[each.token], each) for each in _listed(self.ended.get(host))],
            "removable": [
                {"place": each.place, "kind": each.kind, "age_s": each.age_s, "bytes": each.size}
                for each in getattr(self.storages.get(host), "removable", ())
            ],
            "removed": [
                {"place": each.place, "bytes": each.size, "error": each.error}
                for each in _listed(self.removed.get(host))
            ],
        }

    def _tell_ended(self, host: str, label: str, ended: Ended) -> None:
        """Say it in one line: `3 processes of brisk-otter-3 ended on gpu01`."""
        if ended.ended or ended.answered_by is None:
            self.put(f"{spell_processes(ended.ended)} of {printable(label)} ended on {printable(host)}")
        if ended.answered_by is not None:
            whom = printable(ended.answered_by)
            say(f"{printable(host)}: {printable(label)} is answered for by now, by {whom}: left alone")
        if ended.left:
            say_error(
                f"{host}: {spell_processes(len(ended.left))} of {label} cannot be ended: {', '.join(ended.left)}",
                hint="what waits for a disk or a driver ends when that answers; else the host needs a restart",
            )


def say_unmarked(host: str, run: RunHere) -> None:
    """Say which processes of a run gc cannot take for its own."""
    if run.unmarked:
        pids = " ".join(map(str, run.unmarked))
        say(
            f"{printable(host)}: {spell_processes(len(run.unmarked))} that {printable(run.label)} has started "
            f"carry no cookie, gc leaves them alone: kill {pids}"
        )


def _ended_json(run: str | None, key: str, ended: Ended) -> dict[str, Any]:
    return {
        "run": run,
        "key": key,
        "ended": ended.ended,
        "left": list(ended.left),
        "answered_by": ended.answered_by,
    }


def _directories(count: int) -> str:
    return "1 directory" if count == 1 else f"{count} directories"


def _listed(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else []
