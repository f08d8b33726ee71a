"""The entry of a run, run by one of its ranks: a script, a module, a function or a command.

Placeholders get the rank's own numbers; `sys.argv`, `sys.path` and the working directory are those of a plain
`python script.py` or `python -m module`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clusterddp.ranks.environment import ENVIRONMENT_KEYS, entry_environment, fill_in, placeholder_values

if TYPE_CHECKING:
    from clusterddp.run.directory import AttemptDir


def run_entry(run_dir: str) -> None:
    """Run the entry of the run's plan; return when it does.

    Raises: SystemExit: it exits. Any exception of its own.
    """
    with (Path(run_dir) / "plan.json").open(encoding="utf-8") as file:
        entry: dict[str, Any] = json.load(file)["gang"]["entry"]
    rank = int(os.environ.get("RANK", "0"))
    keys = {name: entry[name] for name in ENVIRONMENT_KEYS if name in entry}
    change_environment(entry_environment(os.environ, **{"init": "tcp"} | keys))
    if entry.get("output_dir"):
        Path(entry["output_dir"]).mkdir(parents=True, exist_ok=True)
    values = placeholder_values(os.environ, entry.get("counts", "processes"))
    args = [_filled(argument, values) for argument in entry["args"]]
    os.chdir(entry["working_dir"])
    if entry["kind"] == "command":
        from clusterddp.node.command import run_command

        run_command(_argv(entry, args, values), entry)
    elif entry["kind"] == "function" and str(entry["target"]).endswith(")"):  # run/call.py
        _run_call(run_dir, entry, rank, values)
    elif entry["kind"] == "function":
        _run_function(entry, args, _filled(entry.get("kwargs", {}), values))
    else:
        _run_program(entry, args)


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Set variables of this process, and remove those that are None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def import_first(modules: Iterable[str]) -> None:
    """Import modules before the entry does; the garbage collector is off then, and has to be enabled again.

    It finds nothing during imports, and never visits these objects later, not at the end of Python either.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and hasattr(distributed, "destroy_process_group"):
        from clusterddp.network.gloo import await_threads_before_destroy

        await_threads_before_destroy(distributed)
    gc.freeze()


def _run_program(entry: dict[str, Any], args: list[str]) -> None:
    """Run a script or a module."""
    target = str(entry["target"])
    script = Path(target).resolve()
    is_script = entry["kind"] == "script"
    _put_first(str(script.parent) if is_script else str(entry["working_dir"]), entry)
    sys.argv[:] = [target, *args]
    if is_script:
        runpy.run_path(str(script), run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _run_function(entry: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    where, _, name = str(entry["target"]).partition(":")
    is_file = where.endswith(".py")
    _put_first(str(Path(where).resolve().parent) if is_file else str(entry["working_dir"]), entry)
    sys.argv[:] = [where]
    found: Any = _import_file(Path(where).resolve()) if is_file else importlib.import_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise SystemExit(f"entry.function: {where} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise SystemExit(f"entry.function: {where}:{name} is a {type(found).__name__}, no function")
    found(*args, **kwargs)


def _run_call(run_dir: str, entry: dict[str, Any], rank: int, values: Mapping[str, str]) -> None:
    """Call the function of the run's submission file, and write what it returns, or its traceback."""
    from clusterddp.run.call import load_call, write_result
    from clusterddp.run.directory import RunDir

    run = RunDir(Path(run_dir))
    where = str(entry["target"]).partition(":")[0]
    _put_first(str(Path(where).parent) if where.endswith(".py") else str(entry["working_dir"]), entry)
    sys.argv[:] = [where]
    call = load_call(run)
    args = [fill_in(value, values) if isinstance(value, str) else value for value in call.args]
    kwargs = {name: fill_in(value, values) if isinstance(value, str) else value for name, value in call.kwargs.items()}
    attempt = run.attempt(int(os.environ["CLUSTERDDP_ATTEMPT"]))
    try:
        value = call.function(*args, **kwargs)
    except Exception as error:
        _write_error(attempt, rank, error)
        raise
    try:
        write_result(attempt, rank, "success", value)
    except Exception as error:
        kind = type(value).__name__
        from clusterddp.errors import ClusterddpError

        failure = ClusterddpError(f"the {kind} that the function returned cannot be pickled: {error}")
        _write_error(attempt, rank, failure)
        raise failure from error


def _write_error(attempt: AttemptDir, rank: int, error: Exception) -> None:
    """Write the traceback of a rank, without our own frame, which is the first."""
    import traceback

    from clusterddp.run.call import write_result

    frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    with contextlib.suppress(OSError):  # the rank prints it, too
        write_result(attempt, rank, "error", "".join(traceback.format_exception(type(error), error, frames)))


def _import_file(path: Path) -> ModuleType:
    """Import a file under its own name, by which its child processes import it; its `__main__` part does not run."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = path.stem if path.stem not in sys.modules else f"_entry_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _put_first(directory: str, entry: dict[str, Any]) -> None:
    """Put on `sys.path` what Python would have put first, which it left out at our own start (system/python.py)."""
    safe = sys.version_info >= (3, 11) and os.environ.get("PYTHONSAFEPATH")
    own = [] if safe or directory in entry["import_paths"] else [directory]
    sys.path[:0] = [*entry["import_paths"], *own]


def _argv(entry: dict[str, Any], args: list[str], values: Mapping[str, str]) -> list[str]:
    if entry.get("shell"):
        return ["/bin/sh", "-c", entry["target"], "sh", *args]
    return [_filled(word, values) for word in (entry["target"], *entry.get("words", ()))] + args


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Replace the placeholders in every text of an argument by their values."""
    if isinstance(value, str):
        return fill_in(value, values)
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    return value
