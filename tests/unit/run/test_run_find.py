"""Finding a run: by its own name, a beginning of it, its path, or the name of its spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.errors import RunNotFoundError, UsageError
from clusterddp.run.find import find_run
from clusterddp.run.seal import sealed


def make(runs: Path, run: str, *, name: str, created: int, ended: bool) -> None:
    attempt = runs / run / "attempts" / "0"
    attempt.mkdir(parents=True)
    (runs / run / "run.json").write_text(json.dumps({"name": name, "created_ns": created}))
    (runs / run / "plan.json").write_text(json.dumps(sealed({"run": run})))
    if ended:
        (attempt / "end.json").write_text("{}")


def test_the_name_of_a_spec_is_its_run_that_goes_on_else_the_newest(tmp_path: Path) -> None:
    make(tmp_path, "old-fox-1", name="mine", created=1, ended=True)
    make(tmp_path, "new-fox-2", name="mine", created=2, ended=True)
    assert find_run(tmp_path, "mine").name == "new-fox-2"
    make(tmp_path, "busy-fox-3", name="mine", created=0, ended=False)
    assert find_run(tmp_path, "mine").name == "busy-fox-3"
    make(tmp_path, "busy-fox-4", name="mine", created=3, ended=False)
    with pytest.raises(UsageError, match="mine matches 2 runs: busy-fox-3, busy-fox-4"):
        find_run(tmp_path, "mine")


def test_the_own_name_of_a_run_comes_before_the_names_of_specs(tmp_path: Path) -> None:
    make(tmp_path, "mine", name="other", created=1, ended=True)
    make(tmp_path, "new-fox-2", name="mine", created=2, ended=True)
    assert find_run(tmp_path, "mine").name == "mine"
    assert find_run(tmp_path, "other").name == "mine"


def test_no_run_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"no runs in .* yet"):
        find_run(tmp_path, "@last")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("[")
    with pytest.raises(RunNotFoundError, match="no run named mine in"):
        find_run(tmp_path, "mine")
