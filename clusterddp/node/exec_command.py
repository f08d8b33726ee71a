"""`python -m clusterddp.node.exec_command RUN_DIR ATTEMPT[/STEP] RANK COMMAND...`: becomes the command of `exec`.

It runs on the machine of the rank, in the rank's working directory and with the rank's environment, which it reads
from the rank's own process, so that no secret is in an argument. `exec_environment` says what the command has otherwise
than its rank. It carries the cookie `x2` and its mark: the supervisor of node 2 kills it when the attempt ends.

The exit code is the command's; 126 and 127 as a shell has them, 125: there is no such rank.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import COOKIE, cookie, exec_environment
from clusterddp.run.cleanup import marking
from clusterddp.run.directory import RunDir
from clusterddp.run.record import RankRecord, read_gang, read_rank
from clusterddp.system.processes import read_environment, read_owner

_NO_RANK, _NOT_EXECUTABLE, _NOT_FOUND = 125, 126, 127
_OF_THE_STEP = ("SLURM_", "SLURMD_", "SPANK_", "PMI_", "PMIX_")


def main(arguments: list[str]) -> NoReturn:
    """Become the command."""
    number, _, step = arguments[1].partition("/")
    run, attempt = RunDir(Path(arguments[0]), step=step or None), int(number)
    rank, command = int(arguments[2]), arguments[3:]
    try:
        record, environ = find_rank(run, attempt, rank)
        os.chdir(f"/proc/{record.pid}/cwd")
    except (ClusterddpError, OSError) as error:
        message = error.message if isinstance(error, ClusterddpError) else str(error)
        _leave(_NO_RANK, f"{socket.gethostname()}: {message}")
    own = {name: value for name, value in os.environ.items() if name.startswith(_OF_THE_STEP) or name == "TERM"}
    place = {"RANK": rank, "LOCAL_RANK": record.local_rank, "NODE_RANK": record.node_rank}
    environment = exec_environment(environ, place, read_gang(run).token) | own | {"PWD": str(Path.cwd())}
    try:
        with marking(environment[COOKIE]):
            os.execvpe(command[0], command, environment)
    except OSError as error:
        code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        _leave(code, f"{command[0]}: {error.strerror}")


def find_rank(run: RunDir, attempt: int, rank: int) -> tuple[RankRecord, dict[str, str]]:
    """Find a live rank of this machine, and the environment that its program has.

    Raises: ClusterddpError: it has ended, or is not on this machine.
    """
    gang, record = read_gang(run, run.attempt(attempt)), read_rank(run.attempt(attempt), rank)
    if record is None or record.ended is not None:
        raise ClusterddpError(f"rank {rank} of {run.name} does not run")
    environ = read_environment(record.pid)
    # The token is the run's secret: a later process with this pid does not carry it.
    is_it = environ.get(COOKIE) in {cookie(gang.token, f"{role}{record.node_rank}") for role in ("n", "w")}
    number = str(attempt)
    is_it = is_it and (environ.get("CLUSTERDDP_ATTEMPT", number), environ.get("RANK", str(rank))) == (number, str(rank))
    if not is_it or read_owner(record.pid) != os.getuid():
        raise ClusterddpError(f"rank {rank} of {run.name} (pid {record.pid}) does not run here")
    if "RANK" not in environ:  # a forked rank: /proc shows what the ranks of its node have in common, in all attempts
        planned = gang.variables_of(rank, run_dir=str(run.path), attempt=attempt, master_port=record.master_port)
        environ = {name: variable.value for name, variable in planned.items()} | environ
    changed = environ | gang.entry.environment(environ)
    return record, {name: value for name, value in changed.items() if value is not None}


def _leave(code: int, message: str) -> NoReturn:
    sys.stderr.write(f"clusterddp: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
