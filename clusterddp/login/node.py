"""The login node of a profile or of a run, and the variables of this shell that a command receives there."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import SpecError, SshError, UsageError
from clusterddp.login.record import SentRun, write_sent_run

if TYPE_CHECKING:
    from clusterddp.spec.ssh_section import Login

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
    from clusterddp.spec.ssh_section import Login

    login = Login.model_validate(sent.login)
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


class FirstLine:
    """Reads the first line of a submit, the run's name or JSON with it, and records where the run is.

    `run` is None until that line is complete.
    """

    def __init__(self, node: Node, runs_dir: Path) -> None:
        self.run: str | None = None
        self._node = node
        self._runs_dir = runs_dir
        self._line = b""

    def read(self, data: bytes) -> tuple[bytes, bytes]:
        """Receive output; return the first line, when it is complete, and what follows it."""
        if self.run is not None:
            return b"", data
        head, newline, rest = (self._line + data).partition(b"\n")
        if not newline:
            self._line = head
            return b"", b""
        self.run = _name_in(head.decode(errors="replace"))
        node, login = self._node, self._node.login.model_dump(mode="json")
        sent = SentRun(run=self.run, profile=node.profile, login=login, secrets=node.secrets, created_ns=time.time_ns())
        write_sent_run(self._runs_dir, sent)
        return head + newline, rest


def explain_cut(node: Node, run: str | None, *, submits: bool) -> SshError:
    """Return the error for a broken connection to the login node.

    `run`: the run that the command names, if any. `submits`: the command starts one.
    """
    found, hint = "the connection broke", "try again"
    if submits and run is None:
        found += "; whether a job was submitted is not known here"
        hint = f"clusterddp list --profile {node.profile}"
    elif run is not None:
        found += "; the run goes on"
        hint = f"clusterddp status {shlex.quote(run)} --profile {node.profile}"
    return SshError(node.login.host, "ask", found, hint=hint, dropped=True)


def _name_in(line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return str(value.get("run") or value.get("sweep")) if isinstance(value, dict) else line
