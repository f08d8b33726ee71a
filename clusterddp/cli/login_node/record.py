"""The login node of a profile or of a run, and the record of each run that is there: `RUNS/.login/<run>.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import ClusterddpError, SpecError, UsageError
from clusterddp.planning.seal import is_sealed, seal
from clusterddp.run.find import created_ns, list_places, list_runs
from clusterddp.system.files import read_record, write_json, write_text

if TYPE_CHECKING:
    from clusterddp.spec.hosts import Login

FOLDER = ".login"
_SEALED = "where a run was sent"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
AT_LOGIN = "CLUSTERDDP_AT_LOGIN"
"""Set for a command that runs on a login node for a laptop: it uses no other login node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A login node, and the profile that names it."""

    profile: str
    login: Login
    secrets: tuple[str, ...] = ()


def find_node(profile: str | None, environ: Mapping[str, str]) -> Node | None:
    """Find the login node of a profile, or of the default profile; None: it has none, or this is the login node."""
    if AT_LOGIN in environ:
        return None
    from clusterddp.spec.layers import read_profile_login

    found = read_profile_login(environ, profile)
    return Node(profile=found[0], login=found[1]) if found else None


def demand_node(profile: str, environ: Mapping[str, str]) -> Node:
    """Find the login node of a profile.

    Raises: UsageError: it has none.
    """
    node = find_node(profile, environ)
    if node is None:
        hint = f"without --profile this is asked here; `login: HOST` below profiles.{profile} of the configuration"
        raise UsageError(f"profile {profile} names no login node", hint=hint)
    return node


def node_of_run(sent: SentRun, environ: Mapping[str, str]) -> Node:
    """Find the login node of a run, with the profile's present values if it still names that host.

    A host that no profile of the user names gets none of the run's secrets.
    """
    from clusterddp.spec.hosts import Login

    known = {name: value for name, value in sent.login.items() if name in Login.model_fields}
    login = Login.model_validate(known)  # earlier versions wrote more
    try:
        node = find_node(sent.profile, environ)
    except SpecError:  # the profile is gone
        node = None
    if node is None or node.login.host != login.host:
        return Node(profile=sent.profile, login=login)
    login = node.login.model_copy(update={"runs_dir": login.runs_dir})
    return Node(profile=sent.profile, login=login, secrets=sent.secrets)


def choose_variables(
    environ: Mapping[str, str], secrets: Sequence[str], *, debug: bool, color: bool | None
) -> dict[str, str]:
    """Choose the variables that go to the login node: values of the spec, the run's secrets, how text is shown."""
    chosen = {name: environ[name] for name in secrets if name in environ}
    chosen |= {name: value for name, value in environ.items() if name.startswith("CLUSTERDDP__")}
    chosen |= {"CLUSTERDDP_CONFIG": "", "CLUSTERDDP_PROJECT": ""}
    if debug:
        chosen["CLUSTERDDP_DEBUG"] = "1"
    if color is not None:
        chosen["FORCE_COLOR" if color else "NO_COLOR"] = "1"
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRun:
    """A run, or a sweep, whose directory is on a cluster."""

    run: str
    profile: str
    login: dict[str, Any]
    """How the login node was reached: the fields of `Login`, `runs_dir` among them."""
    secrets: tuple[str, ...]
    """Names of the variables whose values the run needs again when it is resumed."""
    created_ns: int
    seal: str = ""
    """The user's seal of the other fields: a record that another user wrote is ignored."""

    def sealed(self) -> SentRun:
        return dataclasses.replace(self, seal=seal(_SEALED, self._content()))

    def is_sealed(self) -> bool:
        return is_sealed(_SEALED, self._content(), self.seal)

    def _content(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "seal"}

    def name_there(self, name: str) -> str:
        """Complete a name that was found to be that of this run, or of one of this sweep."""
        return name if name.startswith(f"{self.run}.") else self.run


def write_sent_run(runs_dir: Path, sent: SentRun) -> None:
    """Record where a run is.

    Raises: ClusterddpError: the host's answer is not a name, or the directory cannot be made.
    """
    if not _NAME.fullmatch(sent.run):
        raise ClusterddpError(f"{sent.login['host']}: reports the run name {sent.run[:80]!r}, which is not valid")
    folder = runs_dir / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterddpError(f"{folder}: cannot be made: {error.strerror}") from error
    write_text(folder / ".gitignore", "*\n", exclusive=True)  # this directory is usually in a repository
    write_json(folder / f"{sent.run}.json", dataclasses.asdict(sent.sealed()))


def forget_sent_run(runs_dir: Path, name: str) -> None:
    """Remove the record of a run or sweep that was removed there."""
    if _NAME.fullmatch(name):
        (runs_dir / FOLDER / f"{name}.json").unlink(missing_ok=True)


def list_sent_runs(runs_dir: Path) -> list[SentRun]:
    """List the records, oldest first, without those that cannot be read or that another user has written."""
    found = []
    for path in sorted((runs_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(ClusterddpError, OSError):
            sent = read_record(SentRun, path)
            if sent is not None and sent.is_sealed():
                found.append(sent)
    return sorted(found, key=lambda sent: sent.created_ns)


def find_sent_run(runs_dir: Path, name: str) -> SentRun | None:
    """Find a run that is on a cluster; None: it is here, or there is none.

    Raises: UsageError: several runs begin with this name.
    """
    sent_runs = list_sent_runs(runs_dir)
    if not sent_runs or os.sep in name:
        return None
    if name == "@last":
        here = list_runs(runs_dir)[-1:]
        newest = max(map(created_ns, here), default=0)
        return sent_runs[-1] if sent_runs[-1].created_ns > newest else None
    exact = [sent for sent in sent_runs if name == sent.run or name.startswith(f"{sent.run}.")]
    found = exact or [sent for sent in sent_runs if sent.run.startswith(name)]
    here_names = [path.name for path in list_places(runs_dir) if path.name.startswith(name)]
    if not found or (name in here_names and not exact):
        return None
    if len(found) > 1 or (here_names and not exact) or name in here_names:
        where = [f"{sent.run} on {sent.login['host']}" for sent in found] + [f"{each} here" for each in here_names]
        raise UsageError(f"{name}: {len(where)} runs begin with it: {', '.join(where)}")
    return found[0]
