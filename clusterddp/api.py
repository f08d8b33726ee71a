"""The Python interface to the commands: functions, and the class `Run`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.system.files import read_jsonl

if TYPE_CHECKING:
    from clusterddp.places.ssh.sync import Synchroniser
    from clusterddp.planning.plan import Plan
    from clusterddp.spec.load import ResolvedSpec


@dataclass(frozen=True, slots=True)
class Run:
    """A run that this or another process has submitted."""

    path: Path
    """Its directory."""

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def find(cls, name: str, *, runs_dir: Path | str | None = None) -> Run:
        """Find a run by its name, the beginning of it, `@last`, or its directory.

        Raises: RunNotFoundError: there is none.
        """
        return cls(find_run(_runs_dir(runs_dir), name).path.absolute())

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended, at most `timeout_s`; return its state then."""
        from clusterddp.submission.notices import PATIENCE_S, send_left
        from clusterddp.submission.submit import wait

        with self._sync() as sync:
            view = wait(RunDir(self.path), timeout_s, sync=sync)
            if view.finished:
                sync.download()
                send_left(RunDir(self.path), view, dict(os.environ), patience_s=PATIENCE_S, sync=sync)
        return view.state.value

    def status(self) -> dict[str, Any]:
        """Return what `clusterddp status -o json` prints."""
        from clusterddp.view.status import read_status

        with self._sync() as sync:
            sync.update()
            status = read_status(RunDir(self.path))
            if not status.state.finished:
                return status.to_json()
            sync.download()
        return read_status(RunDir(self.path)).to_json()

    def logs(self, rank: int = 0) -> str:
        """Return the output of a rank of the newest attempt: its standard output, then its standard error."""
        from clusterddp.view.logs import read_logs

        run = RunDir(self.path)
        with self._sync() as sync:
            sync.want_logs([rank], None)
            sync.update_logs()
        attempts = run.attempts()
        pieces: Iterable[Any] = read_logs(run, (rank,)) if attempts else ()
        return b"".join(piece.data for piece in pieces).decode("utf-8", errors="replace")

    def cancel(self, *, save: bool = False) -> str:
        """End the run, with `save` after a checkpoint; return a sentence on the result."""
        from clusterddp.submission.cancel import cancel

        return cancel(RunDir(self.path), save=save)

    def result(self) -> Any:
        """Wait for the end; return what the function of `submit(function)` has returned on rank 0. See `results`."""
        return self.results()[0]

    def results(self) -> list[Any]:
        """Wait for the end; return what the function of `submit(function)` has returned on each rank.

        It loads pickles that the ranks wrote, which executes what their writer chose: only of a run of your own.
        Raises: RankError: the function raised an exception; it has the rank's traceback. RunFailedError,
        RunCancelledError: the run ended otherwise. UsageError: the run is of no function, or another user's.
        """
        from clusterddp.places.functions import read_results
        from clusterddp.places.state import read_state

        self.wait()
        return read_results(RunDir(self.path), read_state(RunDir(self.path)))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl` so far."""
        with self._sync() as sync:
            sync.update()
        return list(read_jsonl(RunDir(self.path).metrics))

    def _sync(self) -> Synchroniser:
        """Return what downloads the files of a run on SSH hosts before they are read."""
        from clusterddp.places.ssh.sync import Synchroniser

        return Synchroniser([RunDir(self.path)], os.environ)


def load_spec(
    source: Path | str,
    overrides: Sequence[str] = (),
    *,
    profile: str | None = None,
    hosts: Sequence[str] | str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ResolvedSpec:
    """Read a spec: a path, or YAML text with a line break. `overrides`: such as `train.lr=0.2`.

    `hosts`: as --hosts, the SSH hosts that run it, in place of the hosts and launcher of the spec.
    Raises: SpecError: it has every problem of the spec.
    """
    from clusterddp.spec.hosts import parse_hosts
    from clusterddp.spec.load import load_spec as load

    named = hosts if isinstance(hosts, str) or hosts is None else ",".join(hosts)
    return load(
        source,
        overrides,
        profile=profile,
        environ=os.environ if environ is None else environ,
        flags={} if named is None else {"launcher": "ssh"},
        hosts=None if named is None else parse_hosts(named),
    )


def plan(
    spec: Path | str | ResolvedSpec | Callable[..., Any],
    overrides: Sequence[str] = (),
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    base: Path | str | None = None,
    profile: str | None = None,
    hosts: Sequence[str] | str | None = None,
    runs_dir: Path | str | None = None,
    working_dir: Path | str | None = None,
) -> Plan:
    """Compute everything that a submit of `spec` would do; nothing is written or started. See `submit`.

    Raises: ClusterddpError: the submit would fail, with the reason.
    """
    from clusterddp.planning.placement import Request
    from clusterddp.planning.plan import plan_run

    place = Path.cwd() if working_dir is None else Path(working_dir)
    request = Request(runs_dir=_runs_dir(runs_dir), working_dir=place, environ=os.environ)
    if callable(spec):
        from clusterddp.places.functions import paths_of_ranks, pickle_call
        from clusterddp.spec.yamlfile import flow_yaml

        call = pickle_call(spec, args, kwargs or {})
        source = f"name: {flow_yaml(call.name)}\n" if base is None else base
        changes = ["~train", "~entry", f"entry={flow_yaml({'function': call.function})}"]
        resolved = load_spec(source, [*changes, *overrides], profile=profile, hosts=hosts)
        environ = os.environ | {"PYTHONPATH": paths_of_ranks(os.environ)}
        return plan_run(resolved, dataclasses.replace(request, environ=environ, submission=call.data))
    if args or kwargs or base is not None:
        raise UsageError("args, kwargs and base go with a function", hint="entry.args=[...] among the overrides")
    if isinstance(spec, Path | str):
        resolved = load_spec(spec, overrides, profile=profile, hosts=hosts)
    elif overrides or profile or hosts:
        raise UsageError("a loaded spec cannot be changed", hint="pass overrides, profile and hosts to load_spec")
    else:
        resolved = spec
    return plan_run(resolved, request)


def submit(
    spec: Path | str | ResolvedSpec | Plan | Callable[..., Any],
    overrides: Sequence[str] = (),
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    base: Path | str | None = None,
    profile: str | None = None,
    hosts: Sequence[str] | str | None = None,
    runs_dir: Path | str | None = None,
) -> Run:
    """Start the run of a spec or a plan; or a function, which every rank calls with `args` and `kwargs`.

    The function and its arguments are pickled by cloudpickle: lambdas, closures and functions of a notebook work, as do
    arguments of any kind; text may have placeholders, such as {rank}. `Run.result` returns what rank 0 returned.
    `base`: a spec with the other settings of its run. `hosts`: run it over SSH on these.

    Raises: ClusterddpError: nothing was started.
    """
    from clusterddp.planning.plan import Plan
    from clusterddp.submission.submit import submit as carry_out

    if isinstance(spec, Plan):
        if overrides or args or kwargs or base or profile or hosts or runs_dir:
            raise UsageError("a plan cannot be changed", hint="pass these arguments to plan(...)")
        return Run(carry_out(spec).run_dir)
    chosen = plan(spec, overrides, args=args, kwargs=kwargs, base=base, profile=profile, hosts=hosts, runs_dir=runs_dir)
    return Run(carry_out(chosen).run_dir)


def _runs_dir(named: Path | str | None) -> Path:
    from clusterddp.spec.layers import default_runs_dir

    return Path(named) if named else default_runs_dir(os.environ)
