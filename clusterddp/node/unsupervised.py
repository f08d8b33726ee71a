"""The end of an unsupervised rank: it writes its own record, as far as it can."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.record import read_rank, write_rank
from clusterddp.system.files import write_json


def record_end(exit_code: int, error: str = "", traceback: str = "") -> None:
    """Write how this process ends; a rank that is killed writes nothing, and neither does what it has forked."""
    with contextlib.suppress(OSError, KeyError, ValueError, ClusterddpError):
        attempt = RunDir(Path(os.environ["CLUSTERDDP_RUN_DIR"])).attempt(int(os.environ["CLUSTERDDP_ATTEMPT"]))
        record = read_rank(attempt, int(os.environ["RANK"]))
        if record is None or record.pid != os.getpid():
            return
        words = " ".join(error.split())[:400] if exit_code else None
        if traceback:  # torchrun has named another file for it
            message = {"message": words, "extraInfo": {"py_callstack": traceback, "timestamp": str(int(time.time()))}}
            write_json(attempt.error_file(record.rank), {"message": message}, exclusive=True)
        write_rank(attempt, dataclasses.replace(record, ended=time.time(), exit_code=exit_code, error=words))
