"""The user's seal: a keyed hash that proves that this user's clusterddp wrote a record.

Other users can write a runs directory, in a repository or on a shared disk. A record that makes clusterddp connect to a
host, start a process there, or send out a value has a seal; clusterddp acts on it only if the seal is right. The key is
in the user's own state directory, outside of runs directories.

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
from pathlib import Path
from typing import Any

import platformdirs

from clusterddp.errors import ClusterddpError
from clusterddp.system.files import write_bytes

_KEY_BYTES = 32
_PARTS = {"ssh": ("seal", "the hosts of a plan"), "notify": ("notify_seal", "the messages of a plan")}
"""The parts of a plan that make clusterddp connect to hosts or send messages: the name and the kind of their seals."""
HINT = "if you submitted it from another machine, copy {key} from there; otherwise another user wrote it"


def seal(what: str, value: Any) -> str:
    """Return the user's seal of a JSON value; `what` names its kind, so that a seal of another kind is not valid."""
    return _hash(_read_key() or _make_key(), what, value)


def is_sealed(what: str, value: Any, found: Any) -> bool:
    """Say whether `found` is this user's seal of the value."""
    key = _read_key()
    if key is None or not isinstance(found, str):
        return False
    return hmac.compare_digest(_hash(key, what, value).encode(), found.encode(errors="replace"))


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a plan with a seal of each of these parts that it has; each seal covers the run's token."""
    parts = {part: _part_of(data, part) for part in _PARTS}
    return data | {_PARTS[part][0]: seal(_PARTS[part][1], granted) for part, granted in parts.items() if granted[1]}


def is_granted(data: Any, part: str) -> bool:
    """Say whether the JSON of a plan has this part, `ssh` or `notify`, under this user's seal."""
    if not isinstance(data, dict) or not isinstance(data.get("gang"), dict) or not _part_of(data, part)[1]:
        return False
    name, what = _PARTS[part]
    return is_sealed(what, _part_of(data, part), data.get(name))


def _part_of(data: dict[str, Any], part: str) -> list[Any]:
    return [data["gang"].get("token"), (data["gang"] if part == "notify" else data).get(part)]


def key_path() -> Path:
    """Return the path of the key, in XDG_STATE_HOME or ~/.local/state."""
    return platformdirs.user_state_path("clusterddp") / "key"


def hint() -> str:
    return HINT.format(key=key_path())


def _hash(key: bytes, what: str, value: Any) -> str:
    text = json.dumps([what, value], sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


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
