"""Makes, sorts and formats the problems of a spec: each with its line and a caret."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

from clusterddp.errors import Problem, SpecError
from clusterddp.spec.tree import Place, escape

MAX_PROBLEMS_SHOWN = 10
LINE_WINDOW = 100
"""How many characters of a source line are shown; of a longer line, those around the problem."""


def format_spec_error(error: SpecError) -> str:
    """Write the error for a terminal: each problem with its place, its line, a caret and a hint.

    Text from the file is escaped, so a file cannot control the terminal.
    """
    shown = error.problems[:MAX_PROBLEMS_SHOWN]
    one_source = len({problem.source for problem in error.problems}) == 1
    lines = [
        f"error: {escape(error.message)}"
        if one_source
        else f"error: the spec has {len(error.problems)} problems, {error.result}"
    ]
    for problem in shown:
        lines += _format_problem(problem)
    if len(error.problems) > len(shown):
        lines.append(f"  ... and {len(error.problems) - len(shown)} more")
    return "\n".join(lines)


def problem_at(place: Place, message: str, hint: str | None = None, *, key: str = "") -> Problem:
    """Make a problem that points at `place`."""
    # A line of `secrets` is not shown: a user may have written a secret's value in place of its name. The address of
    # a webhook is a secret, too.
    source_line = None if key.split(".", maxsplit=1)[0] in {"secrets", "notify"} else place.source_line
    return Problem(
        source=place.source,
        message=message,
        key=key,
        line=place.line,
        column=place.column,
        source_line=source_line,
        hint=hint,
    )


def spec_error(place: Place, message: str, hint: str | None = None, *, key: str = "") -> SpecError:
    """Make the error of a single problem, which points at `place`."""
    return SpecError((problem_at(place, message, hint, key=key),))


def in_order(problems: Iterable[Problem], first_source: str) -> tuple[Problem, ...]:
    """Sort problems by their place, those of `first_source` first, and drop duplicates."""
    unique = list(dict.fromkeys(problems))
    sources = list(dict.fromkeys([first_source, *(problem.source for problem in unique)]))
    order = {source: index for index, source in enumerate(sources)}
    return tuple(sorted(unique, key=lambda problem: (order[problem.source], problem.line or 0, problem.column or 0)))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `. Did you mean "..."?` for the closest choice, or nothing."""
    match = closest(word, choices)
    return f'. Did you mean "{match}"?' if match else ""


def closest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice that is most similar to `word`; None when no choice is similar."""
    if len(word) > 64:
        return None
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), list(choices), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _format_problem(problem: Problem) -> list[str]:
    place = problem.source if problem.line is None else f"{problem.source}:{problem.line}:{problem.column}"
    key = f"{problem.key}: " if problem.key else ""
    lines = [escape(f"  --> {place}  {key}{problem.message}")]
    margin = 4
    if problem.source_line is not None and problem.line is not None and problem.column is not None:
        margin = max(4, len(str(problem.line)) + 1)
        text, width = _window(problem.source_line, problem.column - 1)
        lines += [f"{problem.line:>{margin}} | {text}", f"{'':>{margin}} | {' ' * width}^"]
    if problem.hint:
        lines.append(escape(f"{'':>{margin}}   hint: {problem.hint}"))
    return lines


def _window(line: str, index: int) -> tuple[str, int]:
    """Cut `line` around `index` and return it escaped, with the width in cells of the part before the index."""
    start = max(0, index - LINE_WINDOW // 2) if len(line) > LINE_WINDOW else 0
    before, after = line[start:index], line[index : start + LINE_WINDOW]
    left = "..." if start else ""
    right = "..." if start + LINE_WINDOW < len(line) else ""
    shown_before = left + escape(before)
    return f"{shown_before}{escape(after)}{right}", sum(map(_cells, shown_before))


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
