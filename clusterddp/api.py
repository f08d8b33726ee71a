"""The Python interface to the commands: functions, and the class `Run`; executor.py calls functions as runs.

A `Run` has the methods of a future of concurrent.futures and reads the run's files anew each time, so every process can
have one. `Run.future` is a real future: its owner is a thread of one process.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import html
import inspect
import json
import os
import reprlib
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from clusterddp.errors import ClusterddpError, RunCancelledError, RunFailedError, RunNotFoundError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run, list_runs
from clusterddp.run.record import read_gang, read_run
from clusterddp.spec.layers import default_runs_dir
from clusterddp.system.files import read_jsonl
from clusterddp.system.python import module_command

if TYPE_CHECKING:
    from clusterddp.places.functions import Call
    from clusterddp.places.ssh.sync import Synchroniser
    from clusterddp.planning.plan import Plan
    from clusterddp.run.state import RunView
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.spec.sweep import SweepSpec

_P = ParamSpec("_P")
_T = TypeVar("_T")
Overrides = Sequence[str] | Mapping[str, Any]
"""`["train.lr=0.2"]`, `{"train.lr": 0.2}` or `{"train": {"lr": 0.2}}`."""
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run that this or another process has submitted."""

    path: Path
    """Its directory."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Draw what `status` says now as a small table, for a notebook."""
        from clusterddp.view.printable import printable

        try:
            rows = _rows_of(self.status())
        except ClusterddpError as error:
            rows = {"run": self.name, "error": str(error)}
        cells = ((html.escape(name), html.escape(printable(text))) for name, text in rows.items() if text)
        return "<table>" + "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in cells) + "</table>"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> str:
        """Its state now: PENDING, RUNNING, REQUEUED, COMPLETED, FAILED, CANCELLED, LOST or UNKNOWN."""
        return self._view().state.value

    @property
    def job_id(self) -> str | None:
        """On Slurm the id of its job, `812` or `812_0` in an array; else the pid that carries it; None: not started."""
        return read_run(self._dir()).job_id

    @classmethod
    def find(cls, name: str, *, runs_dir: Path | str | None = None) -> Run:
        """Find a run by its name, the beginning of it, `@last`, or its directory.

        Raises: RunNotFoundError: there is none.
        """
        return cls(find_run(Path(runs_dir or default_runs_dir(os.environ)), name).path.absolute())

    @classmethod
    def list(cls, *, runs_dir: Path | str | None = None) -> builtins.list[Run]:
        """List the runs of a directory, those of sweeps too, the newest first."""
        return [cls(run.path.absolute()) for run in reversed(list_runs(Path(runs_dir or default_runs_dir(os.environ))))]

    def done(self) -> bool:
        """Return whether the run has ended, in whichever way."""
        return self._view().finished

    def running(self) -> bool:
        """Return whether its ranks run; False also while it waits in a queue."""
        return self.state == "RUNNING"

    def cancelled(self) -> bool:
        """Return whether it was cancelled, or stopped at a checkpoint."""
        return self.state == "CANCELLED"

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended, at most `timeout_s`; return its state then."""
        return self._await(timeout_s).state.value

    def status(self) -> dict[str, Any]:
        """Return what `clusterddp status -o json` prints."""
        from clusterddp.view.status import read_status

        with self._sync() as sync:
            sync.update()
            status = read_status(self._dir())
            if not status.state.finished:
                return status.to_json()
            sync.download()
        return read_status(RunDir(self.path)).to_json()

    def logs(self, rank: int = 0) -> str:
        """Return the output of a rank of the newest attempt: its standard output, then its standard error."""
        return "".join(self._output(rank))

    def stdout(self, rank: int = 0) -> str:
        """Return the standard output of a rank of the newest attempt, so far."""
        return self._output(rank)[0]

    def stderr(self, rank: int = 0) -> str:
        """Return the standard error of a rank of the newest attempt, so far."""
        return self._output(rank)[1]

    def cancel(self, *, save: bool = False) -> str:
        """End the run, with `save` after a checkpoint; return a sentence on the result."""
        from clusterddp.submission.cancel import cancel

        return cancel(self._dir(), save=save)

    def resume(self, overrides: Overrides = ()) -> Run:
        """Start the next attempt of a run that ended before it was done, from its newest checkpoint.

        `overrides`: other values, which may give a run that is done more to do.
        Raises: ClusterddpError: it cannot go on, with the reason.
        """
        from clusterddp.submission.submit import resume

        said: list[str] = []
        resume(self._dir(), said.append, overrides=to_words(overrides))
        _warn(text.removeprefix("note: ") for text in said if text.startswith("note: "))
        return self

    def report(self, out: Path | str | None = None) -> Path:
        """Write the page of `clusterddp report`, by default into the run's directory; return its path."""
        target = Path(out) if out else self._dir().report
        command = module_command("clusterddp", "report", str(self.path), "--out", str(target))
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise ClusterddpError(done.stderr.strip().removeprefix("error: "))
        return target

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end; return what the function has returned on rank 0. See `results`."""
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> builtins.list[Any]:
        """Wait for the end; return what the function of the run has returned on each rank.

        It loads pickles that the ranks wrote, which executes what their writer chose: only of a run of your own.
        Raises: RankError: the function raised an exception; it has the rank's traceback. RunFailedError,
        RunCancelledError: the run ended otherwise. TimeoutError: it has not ended after `timeout` seconds.
        UsageError: the run is of no function, or another user's.
        """
        if not read_gang(self._dir()).entry.is_call:
            raise UsageError(
                f"{self.name} has no results: they are of a function that was submitted from Python",
                hint="a program writes its results to {output_dir}",
            )
        return self._values(timeout)

    def exception(self, timeout: float | None = None) -> RunFailedError | RunCancelledError | None:
        """Wait for the end; return why the run did not end well, as `results` raises it; None: it did.

        Of any run, also one of a program. Raises: TimeoutError: it has not ended after `timeout` seconds.
        """
        try:
            self._values(timeout)
        except (RunFailedError, RunCancelledError) as error:
            return error
        return None

    def future(self) -> futures.Future[Any]:
        """Return a future for `concurrent.futures.wait` and `as_completed`; its result is that of `result`.

        That of a program is None. Only `Run.cancel` cancels the run.
        """
        self._dir()
        with _futures_lock:
            is_first = not _futures
            future = _futures.setdefault(self, futures.Future())
            if not future.running():
                future.set_running_or_notify_cancel()  # so its `cancel` says False
            if is_first:  # a thread ends when it finds no future
                threading.Thread(target=_settle_futures, name="clusterddp-futures", daemon=True).start()
            return future

    def add_done_callback(self, function: Callable[[Run], Any]) -> None:
        """Call `function` with this run once it has ended, in a thread of this process."""
        self.future().add_done_callback(lambda _: function(self))

    def metrics(self) -> builtins.list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl` so far."""
        with self._sync() as sync:
            sync.update()
        return list(read_jsonl(RunDir(self.path).metrics))

    def _dir(self) -> RunDir:
        """Return its directory. Raises: RunNotFoundError: there is none, or not yet."""
        run = RunDir(self.path)
        if not run.record.is_file():
            hint = "the runs of a batch are submitted at the end of its `with` block"
            raise RunNotFoundError(f"{self.path}: no such run", hint=hint)
        return run

    def _sync(self) -> Synchroniser:
        """Return what downloads the files of a run on SSH hosts before they are read."""
        from clusterddp.places.ssh.sync import Synchroniser

        return Synchroniser([self._dir()], os.environ)

    def _view(self) -> RunView:
        from clusterddp.places.state import read_state

        with self._sync() as sync:
            sync.update()
            return read_state(RunDir(self.path))

    def _await(self, timeout_s: float | None) -> RunView:
        from clusterddp.submission.notices import PATIENCE_S, send_left
        from clusterddp.submission.submit import wait

        with self._sync() as sync:
            view = wait(RunDir(self.path), timeout_s, sync=sync)
            if view.finished:
                sync.download()
                send_left(RunDir(self.path), view, dict(os.environ), patience_s=PATIENCE_S, sync=sync)
        return view

    def _values(self, timeout_s: float | None) -> builtins.list[Any]:
        """Wait for the end; return the results of the ranks, of a program none. Raises: as `results`."""
        from clusterddp.places.functions import demand_success

        view = self._await(timeout_s)
        if not view.finished:  # before Python 3.11 it is another class than the built-in one
            raise futures.TimeoutError(f"{self.name}: is {view.state.value} after {timeout_s:g} s: {view.reason}")
        return demand_success(RunDir(self.path), view)

    def _output(self, rank: int) -> tuple[str, str]:
        """Read both logs of a rank of the newest attempt; empty: there is none yet."""
        run = self._dir()
        if not 0 <= rank < (size := read_gang(run).world_size):
            raise UsageError(f"{self.name}: has no rank {rank}; its ranks are 0 to {size - 1}")
        with self._sync() as sync:
            sync.want_logs([rank], None)
            sync.update_logs()
        attempts = run.attempts()
        paths = (attempts[-1].stdout(rank), attempts[-1].stderr(rank)) if attempts else ()
        texts = [path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else "" for path in paths]
        return (texts[0], texts[1]) if texts else ("", "")


def _rows_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Choose what a notebook shows of a status."""
    progress, cause = status["progress"] or {}, status["root_cause"] or {}
    done = [
        f"{key} {progress[key]:g}" for key in ("epoch", "step", "loss", "accuracy") if progress.get(key) is not None
    ]
    job = f" {status['job_id']}" if status["job_id"] else ""
    return {
        "run": f"{status['run']}  {status['name']}",
        "state": f"{status['state']}  {status['reason']}",
        "on": f"{status['launcher']}{job}, world size {status['world_size']}, attempt {status['attempt']}",
        "progress": ", ".join(done),
        "first failure": f"rank {cause.get('rank')} on {cause.get('host')}: {cause.get('error')}" if cause else "",
    }


_futures: dict[Run, futures.Future[Any]] = {}
"""Those of runs that have not ended. One thread looks after all of them, so that Slurm is asked once for all."""
_futures_lock = threading.Lock()


def _settle_futures() -> None:
    """Settle each future whose run has ended or is gone, until none is left."""
    from clusterddp.places.ssh.sync import Synchroniser
    from clusterddp.places.state import announce, read_state

    while waiting := {run: RunDir(run.path) for run in _futures.copy()}:
        with Synchroniser(waiting.values(), os.environ) as sync:
            while _futures.copy().keys() == waiting.keys():
                sync.update()
                with contextlib.suppress(ClusterddpError, OSError):
                    announce([(directory, read_run(directory)) for directory in waiting.values()])
                for run, directory in waiting.items():
                    if read_state(directory).finished or not directory.path.exists():
                        _settle(run)
                time.sleep(_POLL_S)


def _settle(run: Run) -> None:
    """Give its outcome to the future of a run that has ended."""
    values: list[Any] = []
    error: Exception | None = None
    try:
        values = run._values(None)
    except Exception as reason:  # also one of loading the results
        error = reason
    with _futures_lock:
        future = _futures.pop(run, None)  # None: another such thread was faster
    if future and error:
        future.set_exception(error)
    elif future:
        future.set_result(values[0] if values else None)


def _explained(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Refuse wrong arguments of a function with a sentence that says where they belong."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"clusterddp.{function.__name__}: {error}", hint=_WHERE) from None
        return function(*args, **kwargs)

    return call


_WHERE = (
    'keys of the spec go into overrides={"resources": {"nodes": 2}}, or to Executor(resources={...}); arguments of a '
    "function into args=[...] and kwargs={...}, or as they are into Executor().submit(f, ...)"
)


@_explained
def load_spec(
    source: Path | str | Mapping[str, Any],
    overrides: Overrides = (),
    *,
    profile: str | None = None,
    hosts: Sequence[str] | str | None = None,
    environ: Mapping[str, str] | None = None,
    working_dir: Path | str | None = None,
) -> ResolvedSpec:
    """Read a spec: a path, YAML text with a line break, or a mapping. `overrides`: such as `{"train.lr": 0.2}`.

    `hosts`: as --hosts, the SSH hosts that run it, in place of the hosts and launcher of the spec. `working_dir`: it is
    submitted from there now, so its script and its secrets have to be there.
    Raises: SpecError: it has every problem of the spec.
    """
    from clusterddp.spec.hosts import parse_hosts
    from clusterddp.spec.load import load_spec as load

    named = hosts if isinstance(hosts, str) or hosts is None else ",".join(hosts)
    return load(
        _text_of(source),
        to_words(overrides),
        profile=profile,
        environ=os.environ if environ is None else environ,
        flags={} if named is None else {"launcher": "ssh"},
        hosts=None if named is None else parse_hosts(named),
        working_dir=None if working_dir is None else Path(working_dir),
    )


@_explained
def plan(
    spec: Path | str | Mapping[str, Any] | ResolvedSpec | Callable[..., Any],
    overrides: Overrides = (),
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    base: Path | str | Mapping[str, Any] | None = None,
    profile: str | None = None,
    hosts: Sequence[str] | str | None = None,
    runs_dir: Path | str | None = None,
    working_dir: Path | str | None = None,
) -> Plan:
    """Compute everything that a submit of `spec` would do; nothing is written or started. See `submit`.

    Raises: ClusterddpError: the submit would fail, with the reason.
    """
    from clusterddp.planning.placement import Request
    from clusterddp.spec.load import ResolvedSpec
    from clusterddp.submission.submit import plan_ahead

    words = to_words(overrides)
    place = Path.cwd() if working_dir is None else Path(working_dir)
    request = Request(runs_dir=Path(runs_dir or default_runs_dir(os.environ)), working_dir=place, environ=os.environ)
    if callable(spec):
        from clusterddp.places.functions import environ_of_ranks, pickle_call

        call = pickle_call(spec, args, kwargs or {})
        resolved = spec_of_call(call, words, base=base, profile=profile, hosts=hosts)
        environ = environ_of_ranks(os.environ)
        return plan_ahead(resolved, dataclasses.replace(request, environ=environ, submission=call.data))
    if args or kwargs or base is not None:
        raise UsageError("args, kwargs and base go with a function", hint="entry.args=[...] among the overrides")
    if isinstance(spec, Path | str | Mapping):
        resolved = load_spec(spec, words, profile=profile, hosts=hosts, working_dir=place)
    elif not isinstance(spec, ResolvedSpec):
        raise UsageError(f"spec is {reprlib.repr(spec)}, expected a path, a mapping, a loaded spec or a function")
    elif words or profile or hosts:
        raise UsageError("a loaded spec cannot be changed", hint="pass overrides, profile and hosts to load_spec")
    else:
        resolved = spec
    return plan_ahead(resolved, request)


@_explained
def submit(
    spec: Path | str | Mapping[str, Any] | ResolvedSpec | Plan | Callable[..., Any],
    overrides: Overrides = (),
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    base: Path | str | Mapping[str, Any] | None = None,
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
    _warn(chosen.notes)
    return Run(carry_out(chosen).run_dir)


@_explained
def submit_sweep(
    spec: Path | str | Mapping[str, Any],
    values: Mapping[str, Sequence[Any]],
    overrides: Overrides = (),
    *,
    parallel: int | None = None,
    profile: str | None = None,
    runs_dir: Path | str | None = None,
) -> list[Run]:
    """Start a run of a spec for each combination of `values`, such as `{"train.lr": [0.1, 0.2]}`; see docs/sweeps.md.

    On Slurm they are one job array, elsewhere a queue. `parallel`: how many may run at a time.
    Raises: ClusterddpError: nothing was started.
    """
    from clusterddp.spec.sweep import load_sweep

    section = _yaml("sweep", {"values": dict(values), "throttle": parallel})
    words = [*to_words(overrides), f"sweep={section}"]
    read = load_sweep(_text_of(spec), words, sweep=False, profile=profile, environ=os.environ)
    return start_sweep(read, runs_dir=Path(runs_dir or default_runs_dir(os.environ)), environ=os.environ)


def start_sweep(spec: SweepSpec, *, runs_dir: Path, environ: Mapping[str, str], name: str | None = None) -> list[Run]:
    """Start the runs of a sweep. `name`: the only one that it may get.

    Raises: ClusterddpError: nothing was started.
    """
    from clusterddp.submission.sweep_array import submit_sweep as carry_out
    from clusterddp.submission.sweep_plan import plan_sweep

    chosen = plan_sweep(spec, runs_dir=runs_dir, working_dir=Path.cwd(), environ=environ, name=name)
    _warn(chosen.notes)
    submitted = carry_out(chosen)
    return [Run(submitted.run_dir / run) for run in submitted.runs]


def _warn(notes: Iterable[str]) -> None:
    """Give the notes of a plan, which the command prints, as warnings at the caller's line."""
    ours = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__)
    level = next((level for level, frame in enumerate(inspect.stack(0), 1) if not frame.filename.startswith(ours)), 1)
    for note in notes:
        warnings.warn(note, stacklevel=level)


def spec_of_call(call: Call, words: Sequence[str], *, base: Any, **place: Any) -> ResolvedSpec:
    """Return the spec of a run that calls a function; `base` has its other settings."""
    source = {"name": call.name} if base is None else base
    changes = ["~train", "~entry", f"entry={_yaml('entry', {'function': call.function})}"]
    return load_spec(source, [*changes, *words], **place)


def _text_of(spec: Path | str | Mapping[str, Any]) -> Path | str:
    """Return a spec as a path, or as YAML."""
    from clusterddp.spec.yamlfile import spec_yaml

    return spec_yaml({key: _plain(key, value) for key, value in spec.items()}) if isinstance(spec, Mapping) else spec


def to_words(overrides: Overrides) -> list[str]:
    """Return overrides as KEY=VALUE."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_yaml(key, value)}" for key, value in _leaves(overrides)]
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if is_list and all(isinstance(word, str) for word in overrides):
        return list(overrides)
    example = '["train.lr=0.2"], {"train.lr": 0.2} or {"train": {"lr": 0.2}}'
    raise UsageError(f"overrides is {reprlib.repr(overrides)}, expected {example}", hint=_WHERE)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested mapping with their values; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _yaml(key: str, value: Any) -> str:
    from clusterddp.spec.yamlfile import flow_yaml

    return flow_yaml(_plain(key, value))


def _plain(key: str, value: Any) -> Any:
    """Return a value of a spec as JSON has it: tuples as lists, paths as text, numbers of numpy as plain ones."""

    def convert(other: Any) -> Any:
        return other.item() if hasattr(other, "item") else os.fspath(other)

    try:
        return json.loads(json.dumps(value, default=convert))
    except (TypeError, ValueError) as error:
        found = f"{key} is {reprlib.repr(value)}, which has no form in YAML: {error}"
        raise UsageError(found, hint="text, numbers, True, False, None, lists and mappings have one") from error
