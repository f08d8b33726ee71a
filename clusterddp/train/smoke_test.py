"""The smoke test of a run: its ranks join, with their real variables, and try once what the run will do.

The ranks of `submit --smoke-test` execute this module in place of the run's entry. For the trainer they take one step
and write a checkpoint. A program of the user's is not executed; the smoke test only imports what it imports.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import Assignment
from clusterddp.run.gang import is_call
from clusterddp.spec.train import TrainSpec
from clusterddp.train.begin import begin, prepare
from clusterddp.train.checkpoint import Store, decode, read_newest
from clusterddp.train.device import RankVariables
from clusterddp.train.group import Group, join_group, leave_group, sum_over_ranks
from clusterddp.train.host import agree_on_compute_slot, load_once
from clusterddp.train.loop import await_checkpoint, save, train_epoch
from clusterddp.train.main import read_plan, set_up_torch
from clusterddp.train.report.reporter import Reporter
from clusterddp.train.state import tensors_sha256


def main(environ: Mapping[str, str]) -> None:
    """Check the run's ranks and its entry."""
    assignment, variables = Assignment.from_environment(environ), RankVariables.from_environment(environ)
    entry = read_plan(assignment.run)["gang"]["entry"]
    with _reported(variables, f"{variables.world_size} ranks meet over {variables.backend}"):
        group = join_group(variables)
    with _reported(variables, f"an all-reduce over {variables.world_size} ranks gives the right sum"):
        number = sum_over_ranks(torch.tensor([group.rank + 1.0], device=group.device), group).item()
    expected = group.world_size * (group.world_size + 1) / 2
    if number != expected:
        raise ClusterddpError(f"an all-reduce gave {number:g} on rank {group.rank}, expected {expected:g}")
    if entry["smoke_test"] is None:
        _check_training(assignment, variables, group, threads=environ.get("OMP_NUM_THREADS"))
    else:
        # Where the code and the packages are those of the node, one of its ranks is enough.
        if variables.local_rank == 0:
            check_program(entry["smoke_test"], variables, code_dir=Path(entry["code_dir"]).resolve())
        sum_over_ranks(torch.zeros(1, device=group.device), group)  # wait for all ranks
    leave_group(group)


def check_program(entry: dict[str, Any], variables: RankVariables, *, code_dir: Path) -> None:
    """Check the run's program without executing it.

    `code_dir`: where the run was submitted from, in the copy of the code; files are named from there.
    """
    target, kind = str(entry["target"]), entry["kind"]
    if kind == "command" and entry.get("shell"):
        with _reported(variables, "the shell can read the command"):
            done = subprocess.run(["/bin/sh", "-n", "-c", target], capture_output=True, text=True, check=False)
            if done.returncode:
                raise ClusterddpError(f"entry.command: /bin/sh: {done.stderr.strip()}")
        return
    if kind == "command":
        with _reported(variables, f"the program {target} is there"):
            if "{" not in target and shutil.which(target) is None:
                raise ClusterddpError(f"entry.command: {target}: no such program on this host")
        return
    where, _, function = target.partition(":") if kind == "function" else (target, "", "")
    if where == "__main__":
        return  # a function of a notebook: no file has it
    file = _find_source(where, is_file=kind == "script" or where.endswith(".py"))
    if kind != "module" and Path(where).suffix == ".py":
        sys.path.insert(0, str(file.parent))
    with _reported(variables, f"{file.name} compiles, and what it imports at its top level is there"):
        _import_what_it_imports(file, file.relative_to(code_dir) if file.is_relative_to(code_dir) else file)
    if function and not is_call(function):
        with _reported(variables, f"{where} has {function}"):
            found: Any = importlib.import_module(file.stem if where.endswith(".py") else where)
            for part in function.split("."):
                found = getattr(found, part, None)
            if not callable(found):
                raise ClusterddpError(f"entry.function: {where} has no function {function}")


def _check_training(assignment: Assignment, variables: RankVariables, group: Group, *, threads: str | None) -> None:
    spec = TrainSpec.from_json(read_plan(assignment.run)["spec"].get("train") or {})
    set_up_torch(spec, threads=threads)
    with _reported(variables, f"the data set {spec.dataset} is there"):
        dataset = load_once(spec, group)
    store = Store(run=assignment.run, attempt=assignment.attempt.number, keep=spec.keep_checkpoints)
    with closing(Reporter(assignment.run, attempt=store.attempt, first=False)) as reporter:
        slot = agree_on_compute_slot(group)
        setting = prepare(spec, dataset, group, store=store, reporter=reporter, slot=slot)
        images = setting.schedule.global_batch
        with _reported(variables, f"{spec.model} takes a step of {images:,} images on {group.device.type}"):
            state = begin(setting)
            train_epoch(state, setting, lambda: None)
            setting.agreement.settle()
        with _reported(variables, "a checkpoint is written, and read back the same"):
            save(state, setting)
            await_checkpoint(state, setting)
            if group.is_first:
                _compare_checkpoint(store, state.model)


def _compare_checkpoint(store: Store, model: nn.Module) -> None:
    complaints: list[str] = []
    newest = read_newest(store, complaints.append)
    if newest is None:
        raise ClusterddpError(f"{store.directory}: the checkpoint cannot be read back: {'; '.join(complaints)}")
    weights = dict(model.named_parameters())
    read = {name: tensor for name, tensor in decode(newest[1])["model"].items() if name in weights}
    if tensors_sha256(read.items()) != tensors_sha256(weights.items()):
        raise ClusterddpError(f"{store.directory / newest[0].file}: other weights than those that were written")


def _find_source(where: str, *, is_file: bool) -> Path:
    if is_file:
        file = Path(where)
        if not file.is_file():
            raise ClusterddpError(f"{file}: no such file on this host")
        return file.resolve()
    for name in (f"{where}.__main__", where):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(name)
            if found is not None and found.origin is not None and found.has_location:
                return Path(found.origin)
    raise ClusterddpError(
        f"entry.module {where}: no module of that name", hint="it is looked for from where you submit"
    )


def _import_what_it_imports(file: Path, name: Path) -> None:
    """Import what a file imports at its top level, but for what it tries to import; `name`: what to call the file."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise ClusterddpError(f"{name}:{error.lineno}: {error.msg}") from error
    for statement in tree.body:
        is_relative = isinstance(statement, ast.ImportFrom) and statement.level
        if is_relative or not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        try:
            exec(compile(ast.Module([statement], []), str(file), "exec"), {})  # noqa: S102 - the user's own import
        except Exception as error:
            raise ClusterddpError(
                f"{name}:{statement.lineno}: {ast.unparse(statement)}: {type(error).__name__}: {error}",
                hint="install it where the ranks run, or set env: {PYTHONPATH: ...} in the spec",
            ) from error


@contextlib.contextmanager
def _reported(variables: RankVariables, what: str) -> Iterator[None]:
    """Print, on rank 0, that `what` succeeded, and its time."""
    began = time.perf_counter()
    yield
    if variables.rank == 0:
        print(f"ok  {what} ({time.perf_counter() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    try:
        main(os.environ)
    except ClusterddpError as error:  # about the user's files: a traceback of ours adds nothing
        print(f"{error.message}; {error.hint}" if error.hint else error.message, file=sys.stderr, flush=True)
        os._exit(1)  # at once: on a busy host Python's own end takes longer than the other ranks take to miss this one
