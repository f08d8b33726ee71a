"""The snippets of docs/frameworks.md are parts of the scripts that a test runs."""

from __future__ import annotations

import re

from tests.support.paths import ROOT


def test_a_snippet_is_a_part_of_a_script_that_runs() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    scripts = [path.read_text() for path in sorted((ROOT / "jobs" / "frameworks").glob("*.py"))]
    assert len(snippets) == len(scripts)
    for snippet in snippets:
        assert any(snippet in script for script in scripts), snippet
