"""The rooms below the places name none of them in their code; comments and docstrings may give one as an example."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import clusterddp

HOME = Path(clusterddp.__file__).parent
PLACES = re.compile(r"slurm|ssh", re.IGNORECASE)
ALLOWED = {
    "node/exec_command.py": "removes the variables of a job step, SLURM_*",
    "node/helpers.py": "over SSH a report is written where the results are read",
    "node/preparation.py": "over SSH an agent has activated the Python that runs the supervisor",
    "node/supervisor.py": "the head's agent is told who joined; a seed of ports that older runs share",
    "ranks/environment.py": "removes the variables of other launchers",
    "ranks/launched.py": "the table of the variables that each launcher sets for a rank",
    "ranks/slurm_step.py": "the variables of srun",
    "run/directory.py": "the name that Slurm gives the copy of a batch script, which `$0` shows",
    "run/job_tag.py": "the text whose hash is the tag of every job that was submitted",
    "run/gang.py": "a field of the plan.json of every run",
    "run/leftovers.py": "names slurmstepd as the owner of a process",
    "run/state.py": "the type of the job that the batch system reports, for type checkers only",
    "run/supervisors.py": "a field of the order: the parent is an agent",
}
"""File -> why its code names a place."""


def named_in_code(path: Path) -> list[str]:
    """Return the names and texts of the code that name a place, without comments and docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Below"]
    docs |= {id(call.args[-1]) for call in calls}  # the docstring of a file's name
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words.append(node.value)
        words += [getattr(node, field) for field in ("id", "attr", "arg", "name", "module") if hasattr(node, field)]
    return [word for word in words if isinstance(word, str) and PLACES.search(word)]


def test_node_run_ranks_and_train_name_no_place() -> None:
    naming = {}
    for room in ("node", "run", "ranks", "train"):
        for path in (HOME / room).rglob("*.py"):
            name = path.relative_to(HOME).as_posix()
            if (words := named_in_code(path)) and name not in ALLOWED:
                naming[name] = words
    assert naming == {}


def test_no_exception_has_outlived_its_reason() -> None:
    assert [name for name in ALLOWED if not named_in_code(HOME / name)] == []
