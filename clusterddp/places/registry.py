"""The launcher with a name; its module is imported when it is first used."""

from __future__ import annotations

from collections.abc import Mapping

from clusterddp.errors import UsageError
from clusterddp.places.base import Launcher
from clusterddp.run.record import BY_HAND, FOREIGN, WORKER


def launcher_named(name: str, environ: Mapping[str, str]) -> Launcher:
    """Return the launcher that a spec or a record names, for a command with the environment `environ`.

    Raises: KeyError: no launcher has this name.
    """
    if name == FOREIGN:
        from clusterddp.places.worker.launcher import ExternalLauncher

        return ExternalLauncher(environ)
    if name in {"local", WORKER, "join"}:  # a node of worker's ends and is read as a local run is
        from clusterddp.places.local.launcher import LocalLauncher

        return LocalLauncher(environ)
    if name == "slurm":
        from clusterddp.places.slurm.launcher import SlurmLauncher

        return SlurmLauncher(environ)
    if name == "ssh":
        from clusterddp.places.ssh.launcher import SshLauncher

        return SshLauncher(environ)
    raise KeyError(name)


def starter_named(name: str, environ: Mapping[str, str], *, run: str = "") -> Launcher:
    """Return the launcher that starts `run`.

    Raises: UsageError: the run's processes were started by hand or by another launcher. KeyError: as `launcher_named`.
    """
    if name in BY_HAND:
        command, where = BY_HAND[name]
        raise UsageError(
            f"{run}: clusterddp worker started it, and has to start it again",
            hint=f"{command} --resume {run}, {where}, goes on with it",
        )
    return launcher_named(name, environ)
