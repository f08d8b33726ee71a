"""An attempt that was overtaken writes nothing that belongs to the run as a whole."""

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.fencing import refuse_if_stale
from clusterddp.train.evaluate import Evaluation
from clusterddp.train.report.metrics import Reporter

OVERTAKEN = "attempt 1 of the run has begun, this is attempt 0"


def make_attempts(path, count):
    for number in range(count):
        RunDir(path).attempt(number).path.mkdir(parents=True)
    return RunDir(path)


def test_the_newest_attempt_may_write(tmp_path):
    refuse_if_stale(make_attempts(tmp_path, 2), 1)


def test_an_attempt_without_a_directory_may_write(tmp_path):
    refuse_if_stale(RunDir(tmp_path), 0)


def test_an_overtaken_attempt_may_not(tmp_path):
    with pytest.raises(ClusterddpError, match=OVERTAKEN):
        refuse_if_stale(make_attempts(tmp_path, 2), 0)


def test_an_overtaken_attempt_adds_no_metrics(tmp_path):
    run = make_attempts(tmp_path, 2)
    reporter = Reporter(run, attempt=0, first=True)
    result = Evaluation(step=1, loss=1.0, correct=1, samples=2)
    with pytest.raises(ClusterddpError, match=OVERTAKEN):
        reporter.evaluation(result, epoch=1, epochs_total=1, steps_total=1, train_seconds=1.0)
    assert not run.metrics.exists()


def test_an_overtaken_attempt_writes_no_summary(tmp_path):
    run = make_attempts(tmp_path, 2)
    with pytest.raises(ClusterddpError, match=OVERTAKEN):
        Reporter(run, attempt=0, first=True).summary({"accuracy": 1.0})
    assert not run.summary.exists()
