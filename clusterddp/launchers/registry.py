"""The launchers by name; each is imported when a run of its is first asked for."""

from __future__ import annotations

import functools

from clusterddp.launchers.base import Launcher
from clusterddp.run.record import FOREIGN


@functools.cache
def launcher_named(name: str) -> Launcher:
    """Return the launcher that a spec or a record names.

    Raises: KeyError: there is none of that name.
    """
    if name == "local":
        from clusterddp.launchers.local.launcher import LocalLauncher

        return LocalLauncher()
    if name == "slurm":
        from clusterddp.launchers.slurm.launcher import SlurmLauncher

        return SlurmLauncher()
    if name == "ssh":
        from clusterddp.launchers.ssh.launcher import SshLauncher

        return SshLauncher()
    if name == "join":
        from clusterddp.launchers.join import JoinLauncher

        return JoinLauncher()
    if name == FOREIGN:
        from clusterddp.launchers.external.launcher import ExternalLauncher

        return ExternalLauncher()
    raise KeyError(name)
