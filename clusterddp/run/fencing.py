"""Whether an attempt is still the run's newest: one that was cut off may go on while its successor has begun."""

from __future__ import annotations

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir


def refuse_if_stale(run: RunDir, attempt: int) -> None:
    """Refuse to let an attempt write what belongs to the run as a whole once a later one has begun.

    Raises: ClusterddpError: it has.
    """
    newest = max((each.number for each in run.attempts()), default=attempt)
    if newest > attempt:
        raise ClusterddpError(f"attempt {newest} of the run has begun, this is attempt {attempt}")
