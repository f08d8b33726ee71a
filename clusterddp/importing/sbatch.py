"""The #SBATCH lines of a batch script: options with their lines, as sbatch reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clusterddp.importing.findings import Findings
from clusterddp.importing.options import SBATCH, Option, take_options
from clusterddp.importing.values import Text

_MARK = "#SBATCH"
_OTHER_MARKS = ("#PBS", "#BSUB", "#$ ", "#COBALT", "#FLUX:")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """An option of the job, and the line that it stands in."""

    option: Option
    line: int
    of: str = "#SBATCH"
    """What it is given to: the job, or the program of the line that starts the ranks."""

    @property
    def text(self) -> str:
        return f"{self.of} {self.option.text}"


def read_sbatch_lines(text: str, findings: Findings) -> dict[str, Given]:
    """Read the options of a batch script: name -> the last one given, as it is the one in force.

    sbatch stops looking at the first line that is a command.
    """
    given: dict[str, Given] = {}
    in_force = True
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")  # noqa: PLW2901
        if not line.startswith(_MARK):
            if line.startswith(_OTHER_MARKS):
                findings.lose(line, "a line for another scheduler", number)
            in_force = in_force and (not line.strip() or line.lstrip().startswith("#"))
            continue
        if not in_force:
            findings.lose(line, "sbatch ignores it: it stands behind the first command of the script", number)
            continue
        options, rest = take_options(list(_words(line.removeprefix(_MARK))), SBATCH)
        for word in rest:
            findings.lose(f"{_MARK} ... {word.text}", "no option of sbatch", number)
        for option in options:
            if option.name in given:
                earlier = given[option.name]
                findings.lose(earlier.option.text, f"replaced in line {number}", earlier.line)
            given[option.name] = Given(option=option, line=number)
    return given


def _words(text: str) -> Iterator[Text]:
    """Split at blanks as sbatch does: quotes keep words together, an unquoted # begins a comment."""
    word: str | None = None
    for match in re.finditer(r"\\(.)|\"([^\"]*)(?:\"|$)|'([^']*)(?:'|$)|(#)|(\s+)|(.)", text, re.DOTALL):
        if match[4]:
            break
        if match[5]:
            if word is not None:
                yield Text(word)
            word = None
            continue
        word = (word or "") + (match[1] or match[2] or match[3] or match[6] or "")
    if word is not None:
        yield Text(word)
