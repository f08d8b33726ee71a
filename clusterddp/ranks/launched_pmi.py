"""The part of PMI-1 that a rank of MPICH's mpirun needs to learn where rank 0 is: put, barrier, get.

One line a command, over the socket that PMI_FD names. Hydra ends the whole job when a process that has used PMI exits
without `finalize`, so `finalize` is sent at once. MPI_Init fails afterwards; a program that needs MPI sets MASTER_ADDR
itself, so that PMI is not used here. Source: MPICH, src/pmi/src/pmi_v1.c; tried with MPICH 4.0.2.
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
"""The longest value, in bytes: some process managers accept only 256."""


def ask_pmi(launched: Launched, environ: Mapping[str, str], addresses: Sequence[str], timeout_s: float) -> Launched:
    """Add the address of rank 0, which the ranks exchange over PMI; every rank has to call this.

    `addresses`: this host's own.
    Raises: ClusterddpError: the process manager does not answer, or its answer is not PMI-1.
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
    variables = {**launched.variables, "MASTER_ADDR": Variable(found[0], "rank 0's address, over PMI")}
    return dataclasses.replace(launched, master_addrs=found, variables=variables, identity=f"mpirun {space}")


def _open(number: str) -> socket.socket:
    try:
        return socket.socket(fileno=os.dup(int(number)))  # MPI_Init needs the descriptor itself
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
