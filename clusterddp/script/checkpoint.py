"""Checkpoints of a script, with the guarantees of the trainer's, and the stop contract.

Rank 0 reads and writes, so ranks need share no disk; only of a state with DTensors every rank writes its part, where it
sees the disk. Outside of a run the working directory takes the place of the run's directory, and no stop is ever asked
for.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from clusterddp.errors import ClusterddpError
from clusterddp.network.gloo import await_gloo_threads
from clusterddp.run.directory import Assignment
from clusterddp.run.metrics import reached
from clusterddp.run.stop import confirm_stop, looking_at, record_question
from clusterddp.script.place import find_assignment, find_store, is_first_rank, say
from clusterddp.system.files import read_json
from clusterddp.system.storage import set_storage_timeout
from clusterddp.train.checkpoint import SHARDS, Timer, Writer, read_newest_on_all, write_checkpoint

if TYPE_CHECKING:
    from clusterddp.train.group import Agreement, Group

Template = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
_SETTLE = timedelta(seconds=10)
"""How long the end of the script waits for a question to the other ranks that is still under way."""


def load(into: Template | None = None, *, map_location: Any = "cpu") -> dict[str, Any] | None:
    """Return the newest valid checkpoint, the same on every rank, with its `step`; None when there is none.

    Every rank calls it, after `init_process_group`. `map_location` is that of `torch.load`. A checkpoint with DTensors
    fills the tensors of `into`, a state with the same keys or a function that returns one, in place, and returns them
    in the state: DTensors of any number of ranks, or whole tensors.
    Raises: ClusterddpError: there are several ranks and no process group; or `into` lacks a tensor of the checkpoint.
    """
    return _session().load(into, map_location)


def due(step: int, *, every: int | None = None, every_s: float | None = None) -> bool:
    """Say whether to save after `step` steps, with the same answer on every rank.

    That is after each `every` steps, `every_s` seconds after the last checkpoint, at the last step that
    `clusterddp.progress` names, and when the run is asked to stop. With neither `every` nor `every_s`: a minute after
    the last one, or so much later that what is done between `due` and the end of `save` takes 1 % of the time. While
    the one before is still being written, it is due later. Every rank calls it in every step.
    Raises: ClusterddpError: the checkpoint before could not be written; or see `load`.
    """
    return _session().due(step, every, every_s)


def save(state: Mapping[str, Any], *, step: int, keep: int = 2, background: bool = True) -> None:
    """Write rank 0's `state` after `step` steps as a checkpoint, and keep the newest `keep`; every rank calls it.

    `state` has text as keys; in it are tensors, numbers, text, None, and dictionaries, lists and tuples of these. Of
    DTensors (FSDP2, tensor parallelism) every rank writes its part. It is copied at once and written while the script
    goes on, but not with `background=False`; before the process group is destroyed, `wait`. When the run is asked to
    stop, and `due` has said so, the checkpoint is written, the stop is confirmed, and the process exits with 0.
    Raises: TypeError: the state holds something else, or a rank's part of a tensor that is no DTensor (FSDP1's
    ShardedTensor, DeepSpeed's partitions). ClusterddpError: it could not be written.
    """
    if keep < 1:
        raise ValueError(f"clusterddp.checkpoint.save: keep is {keep}, expected at least 1")
    _session().save(state, int(step), keep, background=background)


def wait() -> None:
    """Wait until the newest checkpoint is on disk.

    Raises: ClusterddpError: it could not be written.
    """
    _session().wait()


@functools.cache
def _session() -> _Session:
    session = _Session(find_assignment())
    atexit.register(session.close)
    return session


class _Session:
    """The checkpoints of this process."""

    def __init__(self, assignment: Assignment | None) -> None:
        self._assignment = assignment
        self._requested: Callable[[], bool] = lambda: False
        if assignment is not None:
            self._requested = looking_at(assignment.stop_file)
            with contextlib.suppress(ClusterddpError, OSError):  # the default does without
                plan = read_json(assignment.run.plan) or {}
                set_storage_timeout((plan.get("gang") or {}).get("host_silence_s"))
        self._writer: Writer | None = None
        self._timer = Timer(None)
        self._due_at: float | None = None
        """When the checkpoint was due that the script is about to save; None: none is."""

    @functools.cached_property
    def _group(self) -> Group:
        """The ranks of the script: made at the first call that all of them take part in."""
        from clusterddp.train.group import take_group

        group = take_group()
        if group.world_size == 1 and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ClusterddpError(
                "clusterddp.checkpoint is used before the ranks have met",
                hint="call torch.distributed.init_process_group first",
            )
        return group

    @functools.cached_property
    def _agreement(self) -> Agreement:
        from clusterddp.train.group import Agreement

        def save_due() -> bool:
            return self._timer.is_due() and not self._is_writing

        return Agreement(self._group, stop_requested=self._requested, save_due=save_due)

    @functools.cached_property
    def _writing_group(self) -> Group:
        """The ranks again, for the thread that writes a sharded state while the script goes on."""
        from clusterddp.train.group import take_group

        return take_group()

    def load(self, into: Template | None, map_location: Any) -> dict[str, Any] | None:
        file, state = read_newest_on_all(find_store(), self._group, say, map_location)
        if state is None or SHARDS not in state:
            return state
        from clusterddp.train.sharded import fill

        return fill(state, into() if callable(into) else into, file, find_store(), self._group)

    def due(self, step: int, every: int | None, every_s: float | None) -> bool:
        if self._writer is not None:
            self._writer.raise_failure()
        if self._due_at is not None:
            self._note_saved()  # by the script itself, without `save`
        if self._assignment is not None:
            record_question(self._assignment.stop_file)
        timer, agreement, is_last = self._timer, self._agreement, reached.is_last_step
        timer.every_s = math.inf if every and every_s is None else every_s
        if is_last:
            agreement.settle()
        elif self._assignment is not None or timer.is_owed or timer.every_s != math.inf:
            agreement.agreed()
        is_due = is_last or agreement.stopping or agreement.saving
        if not is_due and every and step % every == 0:
            from clusterddp.train.group import max_over_ranks

            timer.is_owed = max_over_ranks(self._is_writing, self._group) > 0
            is_due = not timer.is_owed
        if is_due:
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # steps that are under way are not what the checkpoint takes
            self._due_at = time.monotonic()
        return is_due

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_busy

    def save(self, state: Mapping[str, Any], step: int, keep: int, *, background: bool) -> None:
        if self._due_at is None:
            self._due_at = time.monotonic()
        is_stop = "_agreement" in vars(self) and self._agreement.stopping and not reached.is_last_step
        sharded = self._is_sharded(state)
        if sharded or is_first_rank():
            self._start(_plain(state, "state") | {"step": step}, keep, sharded=sharded)
            if is_stop or reached.is_last_step or not background:
                self.wait()
        self._note_saved()
        if is_stop:
            self._leave(step)

    def _note_saved(self) -> None:
        """Note that the script has made a checkpoint, and what it has taken since it was due."""
        assert self._due_at is not None
        why = self._timer.saved(time.monotonic() - self._due_at)
        self._due_at = None
        if why and is_first_rank():
            say(why)
        if "_agreement" in vars(self):
            self._agreement.saved()

    def _is_sharded(self, state: Mapping[str, Any]) -> bool:
        if "torch.distributed.tensor" not in sys.modules:
            return False  # then nobody has a DTensor
        from clusterddp.train.sharded import is_sharded

        return is_sharded(state, self._group)

    def _start(self, state: dict[str, Any], keep: int, *, sharded: bool) -> None:
        from clusterddp.train.host_copy import copy_to_host

        self.wait()
        store = dataclasses.replace(find_store(), keep=keep)
        self._writer = Writer()
        if not sharded:
            copy = copy_to_host(state)
            self._writer.begin(lambda: write_checkpoint(store, copy))
            return
        from clusterddp.train.sharded import split, write_sharded

        group, (rest, chunks) = self._writing_group, split(state)
        self._writer.begin(lambda: write_sharded(store, group, rest, chunks))

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def _leave(self, step: int) -> NoReturn:
        """Confirm the stop and exit: the checkpoint is written."""
        assignment = self._assignment
        assert assignment is not None, "nothing asks a script outside of a run to stop"
        if is_first_rank():
            why = confirm_stop(assignment, {"step": step})
            say(f"stopped at step {step}, checkpoint written: {why}")
        raise SystemExit(0)

    def close(self) -> None:
        """Report a checkpoint that was not written, and leave no question to the other ranks open."""
        try:
            self.wait()
        except ClusterddpError as error:
            say(f"error: {error}")
        if "_agreement" in vars(self):
            with contextlib.suppress(RuntimeError):  # another rank has ended, or the group is gone
                self._agreement.settle(_SETTLE)
        if "_agreement" in vars(self) or "_writing_group" in vars(self):
            await_gloo_threads()


def _plain(value: Any, where: str) -> Any:
    """Return a state of dictionaries, lists and tuples, which `load` reads again.

    Raises: TypeError: it holds something else; only data can be read without running code of the file.
    """
    torch = sys.modules.get("torch")
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # of numpy's float64, too
    if torch is not None and isinstance(value, torch.Tensor | torch.dtype | torch.device):
        _refuse_partition(value, where)
        return value
    if isinstance(value, Mapping):
        return {_plain(key, f"a key of {where}"): _plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(
            _plain(each, f"{where}[{place}]") for place, each in enumerate(value)
        )
    _refuse_partition(value, where)
    raise TypeError(
        f"clusterddp.checkpoint.save: {where} is a {type(value).__name__}, expected a tensor, a number, text, None, "
        "or a dictionary, list or tuple of these"
    )


def _refuse_partition(value: Any, where: str) -> None:
    """Refuse what is one rank's part of a state, and does not say of what.

    The state_dict of a module under ZeRO-3 has an empty tensor for each parameter; that of an optimizer of DeepSpeed
    has objects of its own.
    Raises: TypeError: it is such a part.
    """
    name, module = type(value).__name__, type(value).__module__
    if name in {"ShardedTensor", "FlatParameter"} and module.startswith("torch."):
        what = f"a {name} of FSDP1, of which each rank has a part"
        way = "wrap the model by torch.distributed.fsdp.fully_shard (FSDP2), or save under FULL_STATE_DICT"
    elif (
        module.startswith("deepspeed.")
        or hasattr(value, "ds_id")
        or ("deepspeed" in sys.modules and hasattr(value, "numel") and value.numel() == 0)
    ):
        what = "DeepSpeed's, and each rank has a part of it"
        way = "engine.save_checkpoint(clusterddp.output_dir()) on every rank, then checkpoint.save({}, step=step)"
    else:
        return
    raise TypeError(f"clusterddp.checkpoint.save: {where} is {what}\nhint: {way}; see docs/frameworks.md")
