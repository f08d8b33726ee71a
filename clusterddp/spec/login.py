"""The login node of a profile: the host on which the commands of a Slurm cluster run, and the Python there.

profiles:
  hpc: {launcher: slurm, slurm: {partition: gpu}, login: {host: hpc, venv: ~/torch, runs_dir: /scratch/ana/runs}}
  lab: {launcher: slurm, login: lab-login}
"""

from __future__ import annotations

from pydantic import Field

from clusterddp.errors import SpecError
from clusterddp.network.hostlist import expand
from clusterddp.spec import fields
from clusterddp.spec.check import check_section
from clusterddp.spec.problems import problem_at
from clusterddp.spec.ssh_section import SshPython
from clusterddp.spec.tree import Mapping, Node, Place, Scalar, describe


class Login(SshPython):
    """A host that SSH reaches, from which jobs are submitted."""

    host: fields.Host = Field(description="Name or alias from ssh_config.")
    host_key: fields.HostKey | None = Field(default=None, description="Its host key, which must be this one.")
    dir: fields.RemotePath = Field(
        default="~/.clusterddp", description="Directory there for clusterddp and the code; the nodes have to see it."
    )
    runs_dir: fields.RemotePath = Field(
        default="~/clusterddp-runs", description="Where the runs lie there; the nodes have to see it."
    )


def read_login(node: Node, place: Place, key: str) -> Login:
    """Read what a profile says of its login node: a mapping, or the name of the host alone.

    `place` is where its key is written.
    Raises: SpecError.
    """
    if isinstance(node, Scalar) and not node.null:
        node = Mapping(entries={"host": node}, keys={"host": place}, place=place)
    if not isinstance(node, Mapping):
        raise SpecError((problem_at(place, f"found {describe(node)}, expected the name of a host", key=key),))
    if "host" not in node.entries:
        raise SpecError((problem_at(place, "names no host, expected host: NAME", key=key),))
    login, problems = check_section(node, Login, key)
    if login is None:
        raise SpecError(tuple(problems))
    wrong = _objection(login)
    if wrong:
        raise SpecError((problem_at(place, wrong, key=key),))
    return login


def _objection(login: Login) -> str | None:
    if len(expand(login.host)) != 1:
        return f"{login.host} is a set of hosts, expected one"
    if login.venv and login.conda:
        return "has both venv and conda, expected one of them"
    return None
