"""The page of error messages: `status` knows the kind of a program's, and ours are in the code."""

from __future__ import annotations

import re

import pytest

from clusterddp.run.record import RankEnd
from clusterddp.view.status import diagnose
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sorted((ROOT / "clusterddp").rglob("*.py"))))
CATEGORIES = {
    "CUDA out of memory": "gpu_memory",
    "was killed by SIGKILL: out of memory": "memory",
    "signal: Bus error": "shared_memory",
    "unable to mmap 4096 bytes from file </torch_1>": "shared_memory",
    "Too many open files": "open_files",
    "Address already in use": "port",
    "Watchdog caught collective operation timeout": "hang",
    "Duplicate GPU detected": "code",
    "invalid device ordinal": "code",
    "ModuleNotFoundError: No module named 'torch'": "code",
    "AF_UNIX path too long": "socket_path",
    "No space left on device": "storage",
    "LocalEntryNotFoundError": "download",
    "URLError": "download",
    "Connection reset by peer": "network",
    "gloo/transport": "network",
    "ncclRemoteError": "network",
    "FileNotFoundError": "data",
}
"""Message of a program -> its kind."""


def rows(heading: str) -> list[list[str]]:
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]


def messages(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_kind_of_each_message_of_a_program_is_checked() -> None:
    listed = [text for row in rows("Out of memory, port in use, ...") for text in messages(row[0])]
    assert listed == list(CATEGORIES)


@pytest.mark.parametrize(("message", "category"), CATEGORIES.items())
def test_a_message_of_a_program_has_its_category(message: str, category: str) -> None:
    end = RankEnd(rank=3, host="node1", exit_code=1, error=message)
    assert diagnose(end).category == category


@pytest.mark.parametrize("message", [text for row in rows("Errors of clusterddp") for text in messages(row[0])])
def test_a_message_of_ours_is_in_the_code(message: str) -> None:
    assert message in CODE
