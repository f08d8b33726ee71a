"""The part of PMI-1 that a rank of MPICH's mpirun needs to learn where rank 0 is: put, barrier, get.

One line a command, over the socket that PMI_FD names. Hydra ends the whole job when a process that has used PMI leaves
without `finalize`, so that is said at once; MPI_Init fails afterwards, which a program that wants it avoids by a
MASTER_ADDR of its own: then PMI is left alone. Source: MPICH, src/pmi/src/pmi_v1.c; tried with MPICH 4.0.2.
"""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

from clusterddp.errors import ClusterddpError
from clusterddp.ranks.environment import Variable
from clusterddp.ranks.launched import Launched

_KEY = "clusterddp-master"
_MAX_VALUE = 240
"""PMI's values are short; some process managers take 256 bytes and no more."""


def ask_pmi(launched: Launched, environ: Mapping[str, str], addresses: Sequence[str], timeout_s: float) -> Launched:
    """Complete what only PMI tells: where rank 0 is; every rank has to call this. `addresses` are this host's own.

    Raises: ClusterddpError: the process manager does not answer, or not as PMI-1 says.
    """
    if launched.master_addrs:
        return launched
    deadline = time.monotonic() + timeout_s
    with _open(environ["PMI_FD"]) as pmi:
        space = _ask(pmi, "get_my_kvsname", "kvsname", deadline)
        if launched.rank == 0:
            value = ",".join(addresses)
            while len(value) > _MAX_VALUE:
                value = value.rpartition(",")[0]
            _ask(pmi, f"put kvsname={space} key={_KEY} value={value}", "rc", deadline)
        _ask(pmi, "barrier_in", "cmd", deadline)
        found = tuple(filter(None, _ask(pmi, f"get kvsname={space} key={_KEY}", "value", deadline).split(",")))
        _ask(pmi, "finalize", "cmd", deadline)
    told = {**launched.told, "MASTER_ADDR": Variable(found[0], "rank 0's address, over PMI")}
    return dataclasses.replace(launched, master_addrs=found, told=told, identity=f"mpirun {space}")


def _open(number: str) -> socket.socket:
    try:
        return socket.socket(fileno=os.dup(int(number)))  # the number itself stays, for MPI_Init
    except (OSError, ValueError) as error:
        raise ClusterddpError(f"PMI_FD is {number!r}, which is no connection to mpirun: {error}") from error


def _ask(pmi: socket.socket, command: str, field: str, deadline: float) -> str:
    """Send a command; return a field of the answer."""
    poll = select.poll()
    poll.register(pmi, select.POLLIN)
    answer = b""
    try:
        pmi.sendall(f"cmd={command}\n".encode())
        while not answer.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("no answer in time")
            letter = pmi.recv(1)
            if not letter:
                raise ConnectionError("it hung up")
            answer += letter
    except OSError as error:
        raise ClusterddpError(f"{socket.gethostname()}: mpirun, asked over PMI for {command!r}: {error}") from error
    fields = dict(part.partition("=")[::2] for part in answer.decode(errors="replace").split())
    if fields.get("rc", "0") != "0" or field not in fields:
        raise ClusterddpError(f"{socket.gethostname()}: mpirun answers {command!r} over PMI with {answer!r}")
    return fields[field]
