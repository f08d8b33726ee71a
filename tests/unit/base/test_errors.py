"""Every error is the same behind a pickle, as a process pool hands it on."""

from __future__ import annotations

import inspect
import pickle

import pytest

from clusterddp import errors
from clusterddp.errors import ClusterddpError, NonsenseError, Problem, RankError, SlurmError, SpecError, SshError

_ARGUMENTS: dict[type[ClusterddpError], ClusterddpError] = {
    SpecError: SpecError((Problem(source="job.yaml", message="wrong", line=3, column=1),), "stopped"),
    SlurmError: SlurmError("sbatch failed", hint="wait", transient=True, reason="no cluster"),
    SshError: SshError("gpu01", "connect", "no route", hint="look", dropped=True),
    NonsenseError: NonsenseError("gpu01", "no JSON"),
    RankError: RankError("otter", 3, "gpu01", "Traceback\nValueError: no"),
}
_KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ClusterddpError)]


@pytest.mark.parametrize("kind", _KINDS)
def test_an_error_is_the_same_behind_a_pickle(kind: type[ClusterddpError]) -> None:
    error = _ARGUMENTS.get(kind) or kind("wrong", hint="try another")
    error.add_note("in the pool")
    read = pickle.loads(pickle.dumps(error))
    assert (type(read), str(read), read.args, vars(read)) == (kind, str(error), error.args, vars(error))
