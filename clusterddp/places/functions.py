"""Functions from Python: pickled as submitit's submission, called by the ranks, their results read.

cloudpickle pickles lambdas, closures, and what was defined in a notebook or a script by value; what a module defines by
its name, so ranks import the module.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError, RankError, RunCancelledError, RunFailedError, UsageError
from clusterddp.run.call import MAX_PICKLE_BYTES, PYTHON, different_python, origin_line, read_origin
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.run.record import read_gang, read_ranks
from clusterddp.run.seal import demand_sealed
from clusterddp.run.state import RunState, RunView
from clusterddp.system.files import open_regular, read_regular, write_bytes

_MAX_ARGUMENT, _MAX_ARGUMENTS = 40, 200
"""How many characters a plan shows of an argument, and of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function with its arguments, pickled."""

    name: str
    """For the run."""
    function: str
    """`entry.function` of its spec: `module:name(arguments)`, or `file.py:name(arguments)`."""
    data: bytes
    values: dict[str, str]
    """Its arguments by name, as people read them."""


def pickle_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Pickle a function with its arguments.

    Raises: UsageError: it does not accept the arguments; it or an argument cannot be pickled, or is too large.
    """
    import cloudpickle
    from submitit.core.utils import DelayedSubmission

    name, place = _name(function)
    bound = _bind(name, function, args, kwargs)
    try:
        data = cloudpickle.dumps(DelayedSubmission(function, *args, **kwargs)) + origin_line()
    except Exception as error:
        raise UsageError(
            f"{name} cannot be pickled with its arguments: {type(error).__name__}: {error}",
            hint="open files, locks, process groups and the like are made in the function, not passed to it",
        ) from error
    if len(data) > MAX_PICKLE_BYTES:
        raise UsageError(
            f"{name} and its arguments take {len(data) / 1e9:.1f} GB pickled, at most {MAX_PICKLE_BYTES / 1e9:.1f}",
            hint="save what is large to a file, and pass its path",
        )
    shown = {key: _show(str, (value,), {}) for key, value in bound.items()}
    return Call(name=name[:64], function=f"{place}({_show(function, args, kwargs)})", data=data, values=shown)


def environ_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Add the directories of this process's modules to PYTHONPATH, so that ranks find them in the snapshot."""
    named = environ.get("PYTHONPATH", "").split(os.pathsep)
    here = [path for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, [*named, *here])))}


def write_submission(run: RunDir, data: bytes | None, parent: RunDir | None, *, here: bool) -> None:
    """Write the submission file of a run: `data`, or that of the run that it repeats.

    `here`: the ranks have this Python.
    Raises: UsageError: that run has none, it is another user's, or of another Python.
    """
    if data is None:
        assert parent is not None  # see refuse_unplannable
        if not parent.submission.exists():
            raise UsageError(f"{parent.path}: has no {parent.submission.name}, which has the function")
        demand_sealed(parent)
        _refuse_foreign(parent.submission)
        theirs = read_origin(parent.submission)["python"]
        if here and theirs != PYTHON:
            raise UsageError(different_python(theirs, PYTHON))
        data = read_regular(parent.submission, MAX_PICKLE_BYTES)
    write_bytes(run.submission, data)


def demand_success(run: RunDir, view: RunView) -> list[Any]:
    """Return the results of a run that has ended well: a value for each rank; of a program there are none.

    Raises: RankError: the call of a rank raised an exception. RunFailedError, RunCancelledError: the run ended
    otherwise, or a rank left no result.
    """
    attempt = run.newest_attempt()
    gang = read_gang(run, attempt)
    ranks = list(range(gang.world_size)) if gang.entry.is_call else []
    if view.state is not RunState.COMPLETED:
        cause = view.end.root_cause if view.end else None
        for rank in sorted(ranks, key=lambda rank: cause is None or rank != cause.rank):
            if attempt.result(rank).exists():
                _load(run, attempt, rank)
        error = RunCancelledError if view.state is RunState.CANCELLED else RunFailedError
        raise error(f"{run.name}: {view.state.value}: {view.reason}")
    return [_load(run, attempt, rank) for rank in ranks]


def _load(run: RunDir, attempt: AttemptDir, rank: int) -> Any:
    import pickle

    place = attempt.result(rank)
    demand_sealed(run)
    try:
        _refuse_foreign(place)
        with open_regular(place) as file:
            outcome, value = pickle.load(file)  # noqa: S301
    except FileNotFoundError as error:
        raise RunFailedError(f"{run.name}: rank {rank} left no result: it ended without a return") from error
    except UsageError:
        raise
    except Exception as error:
        raise ClusterddpError(
            f"{place}: cannot be loaded here: {type(error).__name__}: {error}",
            hint="return data of this machine's packages, and tensors by .cpu()",
        ) from error
    if outcome == "error":
        host = next((record.host for record in read_ranks(attempt) if record.rank == rank), "?")
        raise RankError(run.name, rank, host, str(value))
    return value


def _refuse_foreign(path: Path) -> None:
    """Refuse a file of another user: to load a pickle executes what its writer chose."""
    if (owner := path.stat().st_uid) != os.geteuid():
        raise UsageError(f"{path} belongs to another user (uid {owner}), whose pickle would run code as you")


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's name, and `module:name` or `file.py:name`: beside that file are the modules of a script."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    name = re.sub(r"[^A-Za-z0-9_.]", "", str(named.__qualname__).rpartition("<locals>.")[2]).strip("._0123456789")
    module = str(named.__module__)
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "/").resolve()
    installed = any(file.is_relative_to(sysconfig.get_path(each)) for each in ("purelib", "platlib", "stdlib"))
    if "." not in module and not installed and file.suffix == ".py" and file.is_file() and ":" not in str(file):
        module = str(file)
    return name or "function", f"{module}:{name or 'function'}"


def _show(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write the arguments of a call for people, those of a functools.partial first."""
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_ARGUMENT
    values = [*map(short.repr, args), *(f"{name}={short.repr(value)}" for name, value in kwargs.items())]
    shown = re.sub(r"[\x00-\x20\x7f]+", " ", ", ".join(values)).replace("$", "")
    return shown if len(shown) <= _MAX_ARGUMENTS else f"{shown[:_MAX_ARGUMENTS]}..."


def _bind(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments by the names of the function's parameters. Raises: UsageError: it does not accept them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function without a signature
        return {str(place): value for place, value in enumerate(args)} | dict(kwargs)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        hint = "clusterddp.submit(f, args=[0.1], kwargs={'epochs': 3}); Executor().submit(f, 0.1, epochs=3)"
        raise UsageError(f"{name}{signature}: {error}", hint=hint) from error
