"""Calls of functions as runs, for users of submitit: each call is a run; a `map` or a `batch` is one sweep."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.api import Run, spec_of_call, start_sweep, submit, to_words
from clusterddp.errors import UsageError
from clusterddp.spec.layers import default_runs_dir

if TYPE_CHECKING:
    from clusterddp.places.functions import Call

_OF_SUBMITIT = {
    "folder": "runs_dir=...",
    "cluster": 'launcher="slurm", "local" or "ssh"',
    "timeout_min": 'resources={"time": "1:00:00"}',
    "mem_gb": 'resources={"memory_gb": ...}',
    "tasks_per_node": 'resources={"procs_per_node": ...}',
    **{key: f'resources={{"{key}": ...}}' for key in ("nodes", "gpus_per_node", "cpus_per_task")},
    "array_parallelism": "parallel=...",
    "stderr_to_stdout": "Run.logs(), which has both",
}
"""What submitit's users know -> what it is here; `slurm_partition` and its like are in `slurm`."""


class Executor:
    """Calls functions as runs, as `submitit.AutoExecutor` does: each call is a run, and each of its ranks calls.

    `executor = Executor("slurm", resources={"gpus_per_node": 8}, slurm={"partition": "gpu"})`, then
    `executor.submit(train, 0.1, epochs=3).result()`. See `clusterddp.submit` for what a function may be.
    """

    def __init__(
        self,
        launcher: str | None = None,
        *,
        name: str | None = None,
        resources: Mapping[str, Any] | None = None,
        slurm: Mapping[str, Any] | None = None,
        base: Path | str | Mapping[str, Any] | None = None,
        runs_dir: Path | str | None = None,
        parallel: int | None = None,
        profile: str | None = None,
        hosts: Sequence[str] | str | None = None,
        **keys: Any,
    ) -> None:
        """Keep what all calls share.

        `name`, `resources`, `slurm` and any other key of a spec, such as `env={"A": "1"}`: as in its YAML. `base`: a
        spec with the other keys. `parallel`: how many calls of a `map` or a `batch` may run at a time.
        Raises: UsageError: a name is one of submitit's, with what it is here.
        """
        self._beside: dict[str, Any] = {"base": base, "profile": profile, "hosts": hosts}
        if parallel is not None and parallel < 1:
            raise UsageError(f"parallel is {parallel}, expected at least 1, or None")
        self._parallel = parallel
        self._runs_dir = None if runs_dir is None else Path(runs_dir).absolute()
        self._keys: dict[str, Any] = {}
        self._batch: list[Call] | None = None
        self.update_parameters(launcher=launcher, name=name, resources=resources, slurm=slurm, **keys)

    def __repr__(self) -> str:
        keys = ", ".join(f"{key}={value!r}" for key, value in self._keys.items())
        return f"Executor({keys})"

    def update_parameters(self, **keys: Any) -> None:
        """Change keys of the spec for the calls that follow; of a mapping only the keys that are named; None drops one.

        Raises: UsageError: a name is one of submitit's, with what it is here; or a batch is open.
        """
        if self._batch:
            raise UsageError("the calls of a batch share their parameters", hint="update them above the `with` block")
        for key in keys:
            option = key.removeprefix("slurm_")
            new = _OF_SUBMITIT.get(key) or _OF_SUBMITIT.get(option)
            if option != key and not new:
                new = f'slurm={{"{option}": ...}}, with any of sbatch\'s options'
            if new:
                raise UsageError(f"{key} is submitit's name", hint=f"here it is {new}")
        for key, value in keys.items():
            old = self._keys.get(key)
            self._keys[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
            if value is None:
                del self._keys[key]

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Start the run of a call; in a `batch` it is started at the end of the block.

        Raises: ClusterddpError: nothing was started.
        """
        if self._batch is None:
            return submit(function, self._keys, args=args, kwargs=kwargs, runs_dir=self._runs_dir, **self._beside)
        from clusterddp.places.functions import pickle_call

        self._batch.append(pickle_call(function, args, kwargs))
        return Run(self._sweep / f"{self._sweep.name}.{len(self._batch) - 1}")

    def map(self, function: Callable[..., Any], /, *iterables: Iterable[Any]) -> list[Run]:
        """Start a run of `function(x, y, ...)` for the items of the iterables, which are equally long.

        On Slurm they are the tasks of one job array; elsewhere a queue starts them, as many at a time as there are GPUs
        for, without GPUs one, or `parallel`.
        Raises: ClusterddpError: nothing was started.
        """
        lists = [list(iterable) for iterable in iterables]
        if len({len(items) for items in lists}) > 1:
            raise UsageError(f"map: the iterables have {' and '.join(str(len(items)) for items in lists)} items")
        with contextlib.nullcontext() if self._batch is not None else self.batch():
            return [self.submit(function, *args) for args in zip(*lists, strict=True)]

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Start all calls that are submitted in the `with` block at its end, as `map` does; none after an exception."""
        from clusterddp.planning.plan import choose_run_name

        if self._batch is not None:
            raise UsageError("a batch is open already")
        runs_dir = (self._runs_dir or default_runs_dir(os.environ)).absolute()
        self._sweep = runs_dir / choose_run_name(runs_dir)
        calls = self._batch = []
        try:
            yield
        finally:
            self._batch = None
        if calls:
            self._submit_batch(calls)

    def _submit_batch(self, calls: Sequence[Call]) -> None:
        from clusterddp.places.functions import environ_of_ranks
        from clusterddp.spec.sweep import SweepSpec, Variant

        first = spec_of_call(calls[0], to_words(self._keys), **self._beside)
        variants = []
        for call in calls:
            assert first.job.entry is not None
            entry = first.job.entry.model_copy(update={"function": call.function})
            resolved = dataclasses.replace(first, job=first.job.model_copy(update={"entry": entry}))
            variants.append(Variant(values=call.values, resolved=resolved, submission=call.data))
        keys = tuple(dict.fromkeys(key for call in calls for key in call.values))
        spec = SweepSpec(keys=keys, variants=tuple(variants), throttle=self._parallel)
        environ = environ_of_ranks(os.environ)
        start_sweep(spec, runs_dir=self._sweep.parent, environ=environ, name=self._sweep.name)
