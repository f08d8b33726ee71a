"""Relative paths of results among the arguments of an entry: runs that share a directory overwrite them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from clusterddp.run.gang import Entry
from clusterddp.run.outcome import read_end
from clusterddp.system.files import read_json

_OPTION = re.compile(
    r"o|out|output|outputs|save|save_to|ckpt|results|"
    r"(out|outputs?|save|ckpts?|checkpoints?|logs?|results?|work|exp|default_root)_?(dir|path|file|folder)"
)
"""Names of options by which programs take the place of their results, with `_` for `-`."""
_NO_PATH = re.compile(r"|[-+.\d]+(e[-+]?\d+)?|true|false|yes|no|on|off|none|null", re.IGNORECASE)
_MOST_RUNS = 200
"""How many of the newest runs are compared."""


def relative_outputs(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """List the relative paths that the entry of a plan passes for its results, guessed by the names of options."""
    named = [*_pairs([str(word) for word in (*entry["words"], *entry["args"])]), *entry["kwargs"].items()]
    return tuple(
        dict.fromkeys(
            os.path.normpath(value)
            for name, value in named
            if isinstance(value, str) and _OPTION.fullmatch(name.replace("-", "_").lower()) and _is_relative(value)
        )
    )


def notes_on_outputs(entry: Entry, working_dir: Path, runs_dir: Path, *, in_copies: bool) -> Iterator[str]:
    """Write which results runs overwrite; `in_copies`: the ranks work in copies of the code on other hosts."""
    for path in relative_outputs(asdict(entry)):
        if in_copies:
            yield f"{path} is relative: it lies in each host's copy of the code; {{output_dir}} is copied back"
            continue
        place = working_dir / path
        if writer := _writer_of(path, working_dir, runs_dir):
            yield f"{place}: {writer}, which has not ended, writes there, too; {{output_dir}} is the run's own"
        else:
            yield f"{place}: other runs with this argument overwrite it; {{output_dir}} is the run's own"


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options with their values: `--out x`, `--out=x`, `-o x` and hydra's `out=x`."""
    for word, following in itertools.pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if equals:
            yield name.lstrip("-").rpartition(".")[2], value
        elif word.startswith("--") or word == "-o":
            yield name.lstrip("-").rpartition(".")[2], following


def _is_relative(value: str) -> bool:
    return not value.startswith(("/", "~", "$", "{", "-")) and "://" not in value and not _NO_PATH.fullmatch(value)


def _writer_of(path: str, working_dir: Path, runs_dir: Path) -> str | None:
    """Find a run that has not ended, works in the same directory and passes the same path."""
    for run in reversed(list_runs(runs_dir)[-_MOST_RUNS:]):
        try:
            if not _has_ended(run) and _passes(run, path, working_dir):
                return run.name
        except (ClusterddpError, OSError, KeyError, TypeError):
            continue  # it is being made or removed, or has no valid plan
    return None


def _has_ended(run: RunDir) -> bool:
    return read_end(run.newest_attempt()) is not None


def _passes(run: RunDir, path: str, working_dir: Path) -> bool:
    plan = read_json(run.plan)
    if not isinstance(plan, dict) or plan.get("ssh"):
        return False
    entry = {"words": (), "kwargs": {}} | plan["gang"]["entry"]
    return bool(entry["working_dir"] == str(working_dir) and path in relative_outputs(entry))
