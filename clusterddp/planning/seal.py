"""The user's seal: what a directory says is done only if this user's clusterddp has written it.

A runs directory travels: in a repository, on a shared disk. What it names may be read by anybody, but not obeyed: a
record that makes us connect to a host, start something there, or hand out a value carries a keyed hash of what it says.
The key is in the user's own state directory, which does not travel.
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
HINT = "where you submitted it from another machine, copy {key} from there; otherwise somebody else wrote it"


def seal(what: str, value: Any) -> str:
    """Return the user's seal of a JSON value; `what` tells kinds of values apart.

    Raises: ClusterddpError: there is no key, and none can be written.
    """
    return _hash(_read_key() or _make_key(), what, value)


def is_sealed(what: str, value: Any, found: Any) -> bool:
    """Say whether `found` is this user's seal of the value.

    Raises: ClusterddpError: others may read the key, or it belongs to another user.
    """
    key = _read_key()
    if key is None or not isinstance(found, str):
        return False
    return hmac.compare_digest(_hash(key, what, value).encode(), found.encode(errors="replace"))


def key_path() -> Path:
    """Return where the key is; XDG_STATE_HOME may name another directory than ~/.local/state."""
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
    assert key is not None, "it was written a moment ago"
    return key
