"""A function of a run that was submitted from Python: the file that it travels in, and the results of the ranks.

`submission.pkl` is submitit's submission file: a `DelayedSubmission`, pickled by cloudpickle. A line of JSON follows,
which pickle does not read: the Python that wrote it, and where its modules were. A result file is submitit's, too:
`("success", value)` or `("error", traceback)`. To load either executes what its writer chose.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import AttemptDir, RunDir
from clusterddp.system.files import open_regular

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
CARRIED = Path(__file__).parents[1] / "carried"
"""On a host over SSH: cloudpickle, and what of submitit a submission needs (places/ssh/session.py)."""
MAX_PICKLE_BYTES = 10**9
"""As submitit's max_pickle_size_gb."""
_MAX_LINE = 65536


def origin_line() -> bytes:
    """Return what follows the pickle in a submission file."""
    paths = [str(Path(path).absolute()) for path in sys.path if Path(path).is_dir()]
    return b"\n" + json.dumps({"python": PYTHON, "paths": paths}).encode()


def read_origin(submission: Path) -> dict[str, Any]:
    """Read which Python has pickled a submission, and its `paths`.

    Raises: ClusterddpError: it is no submission file of clusterddp. OSError: it cannot be read.
    """
    with open_regular(submission) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_LINE))
        line = file.read().rpartition(b"\n")[2]
    try:
        origin: dict[str, Any] = json.loads(line)
        return {"python": str(origin["python"]), "paths": list(map(str, origin["paths"]))}
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterddpError(f"{submission}: has not been written by clusterddp.submit(function)") from error


def load_call(run: RunDir) -> Any:
    """Load the `DelayedSubmission` of a run, in a rank.

    Raises: ClusterddpError: this Python cannot load it, with the reason.
    """
    origin = read_origin(run.submission)
    if origin["python"] != PYTHON:
        raise ClusterddpError(f"{different_python(origin['python'], PYTHON)} ({sys.executable})")
    sys.path += [path for path in origin["paths"] if path not in sys.path and Path(path).is_dir()]
    if any(importlib.util.find_spec(name) is None for name in ("cloudpickle", "submitit")):
        if not CARRIED.is_dir():
            raise ClusterddpError(
                f"{sys.executable} has no cloudpickle or no submitit, which carry a function from Python",
                hint="pip install submitit there; or name the function in a spec: entry.function",
            )
        sys.path.append(str(CARRIED))
    try:
        with open_regular(run.submission) as file:
            return pickle.load(file)  # noqa: S301
    except Exception as error:
        hint = ""
        if isinstance(error, ImportError):
            hint = "; ranks import modules from the working directory of the submit, PYTHONPATH, and what is installed"
        raise ClusterddpError(f"the function cannot be loaded: {type(error).__name__}: {error}{hint}") from error


def different_python(theirs: str, here: str) -> str:
    """Return why a function cannot be loaded by another Python."""
    return f"the function was pickled by Python {theirs}, and this is {here}: its code is valid for {theirs} only"


def write_result(attempt: AttemptDir, rank: int, outcome: str, value: Any) -> None:
    """Write the result file of a rank: all of it, or nothing. Raises: any exception of pickling the value."""
    import cloudpickle

    attempt.results.mkdir(mode=0o700, exist_ok=True)
    place = attempt.result(rank)
    temporary = place.with_suffix(".part")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            cloudpickle.dump((outcome, value), file, pickle.HIGHEST_PROTOCOL)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)
