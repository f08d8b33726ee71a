"""What a run that goes on may change, and what makes it another run."""

from __future__ import annotations

from clusterddp.planning.again import TRAINING_KEYS
from clusterddp.train.state import DEFINING


def test_a_resume_refuses_what_the_trainer_would_refuse_with_the_checkpoint() -> None:
    assert set(TRAINING_KEYS) == set(DEFINING)
