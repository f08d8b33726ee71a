"""Programs that tests and benchmarks write as text name modules of the package that are there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

IMPORT = re.compile(r"^\s*from (clusterddp(?:\.\w+)*) import ([\w, ]+)$", re.MULTILINE)
COMMAND = re.compile(r'-m", "(clusterddp(?:\.\w+)*)"|-m (clusterddp(?:\.\w+)+)')
FILES = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
MADE_UP = {"clusterddp.nonsense"}


def texts(path: Path) -> Iterator[str]:
    """Yield the strings of a source file, what is put into them left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "clusterddp" in node.value:
            yield node.value


def is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


def missing_in(path: Path) -> list[str]:
    """List what a file's strings import or start that is not there."""
    found = [(module, names) for text in texts(path) for module, names in IMPORT.findall(text)]
    imported = [(module, each.strip().split(" ")[0]) for module, names in found for each in names.split(",")]
    started = {first or second for first, second in COMMAND.findall(path.read_text())} - MADE_UP
    return [f"{module}.{name}" for module, name in imported if not is_there(module, name)] + [
        module for module in started if importlib.util.find_spec(module) is None
    ]


def test_a_program_in_a_string_imports_what_is_there() -> None:
    assert {str(path.relative_to(ROOT)): missing for path in FILES if (missing := missing_in(path))} == {}
