"""Whether systemd-logind ends the processes of a user who logs out."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PLACES = ("/usr/lib/systemd", "/usr/local/lib/systemd", "/run/systemd", "/etc/systemd")
"""Later ones override earlier ones."""
_YES = {"1", "yes", "y", "true", "t", "on"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Logout:
    """What happens to this user's processes at the end of the session in which they were started."""

    user: str
    in_session: bool
    """This process belongs to a session of systemd-logind."""
    kills: bool
    """KillUserProcesses is on, and applies to this user."""
    lingers: bool
    """The user always counts as logged in (loginctl enable-linger); processes of a session are ended nevertheless."""


def read_logout(root: Path = Path("/")) -> Logout:
    """Read the settings of this machine; a setting that is missing is off, as in the distributions."""
    user = _user_name()
    settings = dict(_read_settings(root))
    only, excluded = settings.get("KillOnlyUsers", "").split(), settings.get("KillExcludeUsers", "root").split()
    meant = (user in only if only else True) and user not in excluded
    with contextlib.suppress(OSError):
        group = (root / "proc/self/cgroup").read_text()
        return Logout(
            user=user,
            in_session=re.search(r"/session-[^/\n]+\.scope", group) is not None,
            kills=settings.get("KillUserProcesses", "no").lower() in _YES and meant,
            lingers=(root / "var/lib/systemd/linger" / user).exists(),
        )
    return Logout(user=user, in_session=False, kills=False, lingers=False)


def _read_settings(root: Path) -> Iterator[tuple[str, str]]:
    """Read logind's settings, the ones that override others last."""
    main = [root / place.lstrip("/") / "logind.conf" for place in _PLACES]
    extras: dict[str, Path] = {}
    for place in _PLACES:
        with contextlib.suppress(OSError):
            extras |= {path.name: path for path in (root / place.lstrip("/") / "logind.conf.d").glob("*.conf")}
    for path in [*main, *(extras[name] for name in sorted(extras))]:
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                if match := re.fullmatch(r"\s*(Kill\w+)\s*=\s*(.*?)\s*", line):
                    yield match[1], match[2]


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
