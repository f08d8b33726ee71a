"""The end of the demo, on runs made by hand; the demo itself is in test_cli_real.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.cli.setup import say_result
from clusterddp.cli.terminal import Terminal
from clusterddp.errors import ClusterddpError, RunFailedError
from clusterddp.spec.load import load_spec
from clusterddp.system.files import write_json
from clusterddp.system.templates import read_template
from tests.support.handmade_runs import make_run

SUMMARY = {"accuracy": 0.9871, "eval_samples": 2000, "train_seconds": 12.4, "world_size": 2}


def test_the_demo_ends_with_what_was_learned_and_what_to_try(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    write_json(run.summary, SUMMARY)
    say_result(run, Terminal({"CLUSTERDDP_RUNS": str(tmp_path)}))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "98.7% of 2000 unseen images classified correctly, after 12s of training on 2 ranks"
    assert "clusterddp status brisk-otter-3" in lines[2]
    assert lines[-1].endswith("clusterddp init")


@pytest.mark.parametrize("summary", [SUMMARY | {"accuracy": 0.9499}, {}])
def test_a_demo_that_did_not_learn_has_failed(summary: dict[str, float], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_json(run.summary, summary)
    with pytest.raises(RunFailedError, match="is below the 95%") as error:
        say_result(run, Terminal({}))
    assert error.value.exit_code == 5


def test_the_demo_needs_no_network_and_no_gpu() -> None:
    job = load_spec(read_template("demo.yaml"), environ={}).job
    assert job.device == "cpu"
    assert job.train is not None
    assert job.train.dataset == "shapes"
    assert job.resources.world_size == 2


def test_a_missing_template_is_reported() -> None:
    with pytest.raises(ClusterddpError, match=r"templates/no\.yaml: not in this installation"):
        read_template("no.yaml")
