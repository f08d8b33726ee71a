"""What a program that left with an error said last on its standard error, and which line of it says the most."""

from __future__ import annotations

import re

_LINES = 20
_HEAD = "Traceback (most recent call last):"
_TORCHRUNS = "ChildFailedError"
"""torchrun's own exception, which says only that a rank had one; the rank's stands before it."""


def last_words(said: str) -> tuple[str, str] | None:
    """Return the line that says the most, and the lines around it: a traceback's, or the last ones.

    None where nothing was said.
    """
    lines = [line for line in said.splitlines() if re.search(r"\w", line)]
    if not lines:
        return None
    if any(line.startswith("torch.distributed.elastic") and _TORCHRUNS in line for line in lines):
        told = [block for block in _tracebacks(said.splitlines()) if _TORCHRUNS not in block[-1]]
        if told:
            return told[-1][-1].strip(), "\n".join(told[-1])
    return lines[-1].strip(), "\n".join(said.splitlines()[-_LINES:])


def _tracebacks(lines: list[str]) -> list[list[str]]:
    """Find the tracebacks, each from its head to the line of its exception.

    torchrun puts `[rank1]: ` before the lines of its ranks, when it is asked to show them all.
    """
    found: list[list[str]] = []
    block: list[str] | None = None
    for line in lines:
        words = re.sub(r"^\[[^\]]*\]:? ?", "", line)
        if words.startswith(_HEAD):
            block = [words]
        elif block is not None:
            block.append(words)
            if words and not words.startswith((" ", "\t")):
                found.append(block)
                block = None
    return found
