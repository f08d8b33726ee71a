"""The pages of a run's files and of JSON output, from the classes that have them and the texts below their fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_pictures import status_json
from docs_text import WIDTH, cell, head, items, page

from clusterddp.cli.main import WITHOUT_JSON
from clusterddp.run.directory import AttemptDir, Below, RunDir
from clusterddp.run.record import RankEnd, StartedPython
from clusterddp.run.state import RunState
from clusterddp.run.sweep import SweepDir
from clusterddp.view import ranks, status
from clusterddp.view.effective import Effective
from clusterddp.view.events import Stopping
from clusterddp.view.steps import StepStatus
from clusterddp.view.timeline import Times


def files_page() -> str:
    lines = head(
        "Files of a run",
        "A run is a directory in `runs/` (or `--runs`, `CLUSTERDDP_RUNS`), for you alone (mode 0700). Its state is "
        "derived from these files and from the processes that they name; it is stored nowhere.",
    )
    lines += ["## The run", "", *_files(RunDir(Path("RUN"))), ""]
    lines += ["## Each attempt", "", "In `attempts/0`, `attempts/1`, ...", "", *_files(AttemptDir(Path("N"))), ""]
    lines += ["## A sweep", "", "Its runs are in it.", "", *_files(SweepDir(Path("SWEEP")))]
    return page(lines)


_STARTED = "`run`, `launcher`, `job_id`, `run_dir`; with `-n` the plan"
FORMS = {
    "doctor": ("`healthy`, `checks`", "-r '.checks[] | select(.level == \"red\") | .fix'"),
    "hosts check HOST...": ("`healthy`, `hosts`", "-r '.hosts[].fix // empty'"),
    "submit SPEC": (_STARTED, "-r .run"),
    "hold SPEC": (_STARTED, "-r .run"),
    "resume RUN": (_STARTED, "-r .job_id"),
    "cancel RUN...": ("`runs`: `run`, `result` or `error`", "-r '.runs[] | select(.error) | .run'"),
    "status RUN": (
        "below; of a sweep `sweep`, `states`, `runs`, ...",
        "-r .root_cause.host",
    ),
    "logs RUN --rank all": ("an object for each line", "-r 'select(.ranks == [3]) | .text'"),
    "stacks RUN": ("`verdict`, `suspects`, `groups`, `hint`, `ranks`", ".suspects"),
    "wait RUN": ("as `status`", "-r .state"),
    "rm RUN...": ("`runs`, `refused`, `code`, `unfinished`", "'[.runs[].bytes] | add'"),
    "list": ("an array of objects, below", "-r 'max_by(.progress.accuracy // 0).run'"),
    "report RUN...": ("`runs`, `path`, `bytes`", "-r .path"),
    "compare RUN RUN...": ("`runs`, `differences`, `diffs`", "-r '.differences.spec | keys[]'"),
    "nodes": ("`nodes`: `node`, `why`, `run`, `since`, `until`, ...; `cleared`", "-r '.nodes[].node'"),
    "ps": ("`hosts`", "-r '.hosts[].runs[]?.run'"),
    "gc -n": ("`hosts`", "'[.hosts[].left_over[]?.processes[].pid]'"),
}
"""Call of a command -> the keys of its JSON, and arguments of jq."""


def json_page() -> str:
    lines = head(
        "JSON output",
        "`-o json` prints JSON and nothing else on standard output. A number that is not known is null. Keys may be "
        "added; a key keeps its meaning. Each object has `schema`, which is 1; a form in which a key means something "
        "else would have another number. [What scripts may rely on](../cli.md) explains the keys of the commands.",
    )
    lines += ["## Commands", "", "| command | its JSON |", "|---|---|"]
    lines += [f"| `{command}` | {cell(keys)} |" for command, (keys, _) in FORMS.items()]
    shown = [line for line in jq_examples() if line.split()[1] in ("submit", "status", "list", "doctor")]
    lines += ["", "With jq:", "", "```text", *shown, "```", ""]
    lines += ["These have no `-o json`:", "", *items(WITHOUT_JSON), ""]
    top = {key: value for key, value in json.loads(status_json()).items() if key != "schema"}
    lines += ["## status RUN -o json", "", *_fields(status.RunStatus, top, alias={"nccl": "transports"})]
    lines += ["### times", "", *_fields(Times), "### stopping", "", *_fields(Stopping)]
    lines += ["### effective", "", *_fields(Effective)]
    lines += ["### progress", "", *_fields(status.Progress)]
    lines += ["### ranks", "", *_fields(status.RankStatus)]
    lines += ["### steps", "", *_fields(StepStatus)]
    lines += ["### usage", "", "Of a rank:", "", *_fields(ranks.RankUsage)]
    lines += ["### python", "", "Of a rank:", "", *_fields(StartedPython)]
    lines += ["### root_cause", "", *_fields(RankEnd, top["root_cause"])]
    lines += ["### diagnosis", "", *_fields(status.Diagnosis)]
    lines += ["### nccl", "", *_fields(status.NodeTransport)]
    lines += ["## list -o json", "", "An array of:", "", *_fields(status.RunSummary)]
    lines += ["## States of a run", "", *items(_attribute_docs(RunState)), ""]
    lines += ["## States of a rank", "", *items(_rank_states())]
    return page(lines)


def jq_examples() -> list[str]:
    """Return a command line with jq for each command."""
    return [f"clusterddp {command} -o json | jq {filters}" for command, (_, filters) in FORMS.items()]


def _files(place: RunDir | AttemptDir | SweepDir) -> list[str]:
    """List the paths below a directory that its class has, with what their docstrings say."""
    texts: dict[str, str] = {}
    arguments = {"rank": 3, "node_rank": 0, "tag": "TAG", "number": 0}
    for name, member in vars(type(place)).items():
        if name.startswith("_") or not member.__doc__:
            continue
        if isinstance(member, Below):
            path = getattr(place, name)
        elif inspect.isfunction(member) and inspect.signature(member).return_annotation == "Path":
            path = member(place, *(arguments[each] for each in list(inspect.signature(member).parameters)[1:]))
        else:
            continue
        texts[str(path.relative_to(place.path))] = " ".join(inspect.cleandoc(member.__doc__).split())
    return items(texts)


def _fields(kind: type, only: Mapping[str, Any] | None = None, *, alias: Mapping[str, str] | None = None) -> list[str]:
    """List the fields of a dataclass, or those of them that are keys of `only`, with their types and texts."""
    docs: dict[str, str] = {}
    types: dict[str, Any] = {}
    for each in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        docs, types = docs | _attribute_docs(each), types | inspect.get_annotations(each)
    names = list(types) if only is None else list(only)
    lines: list[str] = []
    for name in names:
        field = (alias or {}).get(name, name)
        text = f"* `{name}` ({_json_type(str(types[field]))}): {docs.get(field, '')}"
        lines += textwrap.wrap(text.rstrip(": "), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, ""]


def _json_type(annotation: str) -> str:
    """Write a type of Python as JSON has it."""
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "None": "null"}
    parts = [part.strip() for part in annotation.split("|")]
    return " or ".join(_json_part(part, words) for part in parts)


def _json_part(part: str, words: Mapping[str, str]) -> str:
    inner = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", part)
    if inner:
        return f"array of {words.get(inner[1], 'objects')}"
    if part.startswith("dict["):
        return "object"
    if part.endswith("State"):
        return "state"
    return words.get(part, "object")


def _rank_states() -> dict[str, str]:
    """Return what stands below RankState: STATE: words. STATE: words."""
    body = ast.parse(inspect.getsource(ranks)).body
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.Assign) and getattr(above.targets[0], "id", "") == "RankState":
            text = " ".join(ast.literal_eval(below.value).split())  # type: ignore[attr-defined]
            parts = re.split(r"(?:^|(?<=\. ))([A-Z_]{4,}): ", text)[1:]
            return {name: words.strip() for name, words in zip(parts[::2], parts[1::2], strict=True)}
    raise LookupError("RankState")


def _attribute_docs(kind: type) -> dict[str, str]:
    """Return the texts that stand below the attributes of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for above, below in itertools.pairwise(body.body):
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            target = above.target if isinstance(above, ast.AnnAssign) else getattr(above, "targets", [None])[0]
            if isinstance(target, ast.Name):
                found[target.id] = " ".join(below.value.value.split())
    return found
