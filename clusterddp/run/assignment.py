"""Which run and attempt a rank belongs to, read from its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The run and the attempt that this process belongs to, and the file that requests a stop."""

    run: RunDir
    attempt: AttemptDir
    stop_file: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Assignment:
        """Read the variables.

        Raises: ClusterddpError: no run is named.
        """
        try:
            run = RunDir(Path(environ["CLUSTERDDP_RUN_DIR"]))
        except KeyError as error:
            raise ClusterddpError(
                "CLUSTERDDP_RUN_DIR is not set", hint="clusterddp submit starts the trainer"
            ) from error
        attempt = run.attempt(int(environ.get("CLUSTERDDP_ATTEMPT", "0")))
        stop_file = environ.get("CLUSTERDDP_STOP_FILE")
        return cls(run=run, attempt=attempt, stop_file=Path(stop_file) if stop_file else attempt.stop_file)
