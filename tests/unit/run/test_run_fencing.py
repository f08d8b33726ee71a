"""An attempt that was overtaken writes nothing that belongs to the run as a whole."""

import pytest

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir, refuse_if_stale
from clusterddp.spec.train import TrainSpec
from clusterddp.system.files import read_jsonl
from clusterddp.train.evaluate import Evaluation
from clusterddp.train.optim import plan_schedule
from clusterddp.train.report.reporter import Reporter
from tests.support.storage_faults import away, disk

SCHEDULE = plan_schedule(TrainSpec(epochs=1), num_samples=1000, world_size=1)
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
        reporter.evaluation(result, SCHEDULE, epoch=1, steps_total=7, train_seconds=1.0)
    assert not run.metrics.exists()


@pytest.mark.root
def test_rows_that_a_full_disk_does_not_take_are_counted_and_training_goes_on(tmp_path, capsys):
    with disk(tmp_path / "disk", size="2M") as full:
        run = make_attempts(full.path, 1)
        reporter = Reporter(run, attempt=0, first=True)
        report(reporter, 1)
        filler = full.fill()
        while len(lost := capsys.readouterr().err.split("warning")) == 1:  # what is left of the block of the file
            report(reporter, 2)
        report(reporter, 3)
        filler.unlink()
        report(reporter, 4)
        steps = [row["step"] for row in read_jsonl(run.metrics)]
        assert (steps[0], steps[-1], 3 in steps) == (1, 4, False)
        assert "No space left" in lost[1]
        assert [row["rows"] for row in read_jsonl(run.events) if row["event"] == "rows_lost"] == [2]


def test_rows_are_lost_while_the_storage_is_away_and_training_goes_on(tmp_path):
    run = make_attempts(tmp_path / "run", 1)
    reporter = Reporter(run, attempt=0, first=True)
    with away(run.path):
        report(reporter, 1)
        assert not run.path.exists()
    report(reporter, 2)
    assert [row["step"] for row in read_jsonl(run.metrics)] == [2]


def report(reporter, step):
    result = Evaluation(step=step, loss=1.0, correct=1, samples=2)
    reporter.evaluation(result, SCHEDULE, epoch=1, steps_total=7, train_seconds=1.0)


def test_an_overtaken_attempt_writes_no_summary(tmp_path):
    run = make_attempts(tmp_path, 2)
    with pytest.raises(ClusterddpError, match=OVERTAKEN):
        Reporter(run, attempt=0, first=True).summary({"accuracy": 1.0})
    assert not run.summary.exists()
