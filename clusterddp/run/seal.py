"""The user's seal: a keyed hash that proves that this user's clusterddp wrote a plan, or another record.

Other users can write a runs directory, in a repository or on a shared disk. A plan is obeyed only if it has the seal:
only then does clusterddp start, ask, end or send anything of its run. Without it, the run is data that can be read. The
key is in the user's own state directory, outside of runs directories.

All raise a ClusterddpError if the key cannot be read or written, or if another user can read it or owns it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.run.directory import RunDir
from clusterddp.system.directories import state_directory
from clusterddp.system.files import read_json, write_bytes, write_json

Mark = Literal["", "unsealed", "another user's"]
"""Why a run is not obeyed; empty: it is this user's own."""
_KEY_BYTES = 32
_KEY_DIGITS = 16
"""The first digits of a seal say which key made it."""


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the user's seal over all of it; a record of one kind has keys that the others lack."""
    return record | {"seal": _seal_of(_read_key() or _make_key(), record)}


def is_sealed(record: Any) -> bool:
    """Return whether a record has this user's seal."""
    key = _read_key()
    found = record.get("seal") if isinstance(record, dict) else None
    if key is None or not isinstance(found, str):
        return False
    return hmac.compare_digest(_seal_of(key, record).encode(), found.encode(errors="replace"))


def mark_of(run: RunDir) -> Mark:
    """Say in a word why a run is not this user's own; empty: it is."""
    try:
        if {os.stat(path).st_uid for path in (run.path, run.plan)} != {os.geteuid()}:
            return "another user's"
        return "" if is_sealed(read_json(run.plan)) else "unsealed"
    except (ClusterddpError, OSError):
        return "unsealed"


def is_ours(run: RunDir) -> bool:
    """Return whether a run is this user's own, so that clusterddp may act on its records."""
    return not mark_of(run)


def demand_sealed(run: RunDir) -> dict[str, Any]:
    """Return the plan.json of a run of this user's own, to act on it.

    Raises: UsageError: another user has the run, or its plan has no seal of this user. ClusterddpError: it has no plan.
    """
    if mark_of(run) == "another user's":
        raise UsageError(
            f"{run.name} belongs to another user, and only that user can start it, ask it or end it",
            hint=f"clusterddp submit {run.spec} starts its spec as a run of your own",
        )
    plan = _read_plan(run)
    if not is_sealed(plan):
        raise UsageError(
            f"{run.name} is unsealed, so nothing of it is started, asked or ended: its plan was changed, or an earlier "
            "version, another user or another of your machines wrote it",
            hint=f"clusterddp resume {run.name} --trust shows what it starts, and seals it; for the runs of your "
            f"other machines, copy their key, {key_path()}",
        )
    return plan


def refuse_changed(run: RunDir) -> dict[str, Any]:
    """Return the plan.json of a run, in a job of it, whose machine may have no key, or another one.

    Raises: ClusterddpError: the plan was changed after the submit, or there is none.
    """
    plan, key = _read_plan(run), None
    with contextlib.suppress(ClusterddpError, RuntimeError):
        key = _read_key()
    if key is None or str(plan.get("seal"))[:_KEY_DIGITS] != _name_of(key):
        print(f"clusterddp: {run.plan}: is not checked, for this machine lacks the key of its seal", flush=True)
    elif not is_sealed(plan):
        raise ClusterddpError(f"{run.plan}: was changed after the submit, so nothing of it is started")
    return plan


def trust(run: RunDir, show: Callable[[dict[str, Any]], object]) -> None:
    """Seal the plan of a run of an earlier version, or of another machine; `show` receives it first.

    Raises: UsageError: another user has the run. ClusterddpError: it has no plan.
    """
    plan = demand_sealed(run) if mark_of(run) == "another user's" else _read_plan(run)
    show(plan)
    write_json(run.plan, sealed(plan))


def key_path() -> Path:
    """Return the path of the key, in XDG_STATE_HOME or ~/.local/state."""
    return state_directory() / "key"


def _read_plan(run: RunDir) -> dict[str, Any]:
    plan = read_json(run.plan)
    if plan is None:
        raise ClusterddpError(f"{run.plan}: is missing, and the run cannot continue without it")
    if not isinstance(plan, dict) or not isinstance(plan.get("gang"), dict) or "token" not in plan["gang"]:
        raise ClusterddpError(f"{run.plan}: found no plan in it")
    return plan


def _seal_of(key: bytes, record: dict[str, Any]) -> str:
    # As the record is read back from its file: the keys of dictionaries are text there.
    value = json.loads(json.dumps({name: record[name] for name in record if name != "seal"}))
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return _name_of(key) + hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _name_of(key: bytes) -> str:
    return hmac.new(key, b"the name of the key", hashlib.sha256).hexdigest()[:_KEY_DIGITS]


def _read_key() -> bytes | None:
    path = key_path()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClusterddpError(f"{path}: cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ClusterddpError(f"{path}: others can read this key, or wrote it", hint=f"rm {path}")
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise ClusterddpError(f"{path}: has {len(key)} bytes, expected {_KEY_BYTES}", hint=f"rm {path}")
    return key


def _make_key() -> bytes:
    path = key_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ClusterddpError(
            f"{path.parent}: cannot be made: {error.strerror}", hint="XDG_STATE_HOME names another directory"
        ) from error
    with contextlib.suppress(FileExistsError):
        write_bytes(path, secrets.token_bytes(_KEY_BYTES), exclusive=True)
    key = _read_key()
    assert key is not None, "the key was written just before"
    return key
