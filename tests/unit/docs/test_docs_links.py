"""Links, anchors and paths of the docs lead somewhere, every page is in the navigation, prose and cells are short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "tests").rglob("README.md")),
    ROOT / "jobs/README.md",
    *sorted((ROOT / ".github").rglob("*.md")),
]
WRITTEN = re.compile(
    r"<!-- (table|releases|packages|bars|cpu|ranks|link-\d+|loss|gpu-\w+|curves)\b.*?<!-- (/|end of)[^>]*-->", re.DOTALL
)
"""What programs write; its lines are as long as they are."""
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"\b(?:tests|benchmarks|jobs|templates|tools|docs)/[\w./-]*\.(?:py|yaml|md|sh)\b")
MOST_COLUMNS = 110
TASKS = (
    *("install", "first-run", "environments", "frameworks", "python", "gpus", "data", "project", "faq", "debug"),
    *("results", "trackers", "notify", "cleanup", "status"),
)
"""Pages for one task of a user; the others explain a subject or are looked up."""
MOST_WORDS_OF_A_TASK = 400
MOST_CODE_COLUMNS = 80
LONGEST_CELL = 160


def prose_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in _LINK.findall(prose_of(page)):
            yield page, target


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them; mkdocs makes the same of our headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def test_every_link_leads_to_a_file_and_an_anchor() -> None:
    broken = []
    for page, target in links():
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path)):
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_path_that_the_docs_name_exists() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = {(page, path) for page in pages for path in _PATH.findall(prose_of(page))}
    assert sorted(f"{page.name}: {path}" for page, path in named if not (ROOT / path).exists()) == []


def test_every_page_that_the_code_names_exists() -> None:
    files = [*(ROOT / "clusterddp").rglob("*.py"), *(ROOT / "jobs").rglob("*.yaml"), *(ROOT / "templates").glob("*")]
    named = {(file, page) for file in files for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())}
    assert sorted(f"{file.relative_to(ROOT)}: {page}" for file, page in named if not (ROOT / page).is_file()) == []


def test_every_page_is_in_the_navigation_or_a_decision_of_its_list() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"]))
    decisions = [f"decisions/{name}" for name in _LINK.findall((DOCS / "decisions/index.md").read_text())]
    assert sorted(listed + decisions) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_lines_of_prose_wrap_and_cells_are_short(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("an entry is a line for its reader; the file is not filled anew")
    too_long = []
    for line in WRITTEN.sub("", prose_of(page)).splitlines():
        if line.startswith("|"):
            too_long += [cell for cell in line.split(" | ") if len(cell) > LONGEST_CELL]
        elif len(line) > MOST_COLUMNS and not re.match(r"!\[|<!--|    ", line) and " " in line.strip()[:MOST_COLUMNS]:
            too_long.append(line)
    assert too_long == []


def test_no_line_of_code_is_wider_than_its_column() -> None:
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
        for block in _FENCE.findall(page.read_text())
        for line in block.splitlines()
        if len(line) > MOST_CODE_COLUMNS
    ]
    assert wide == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_readme_has_the_measured_ratios() -> None:
    """Those against the others' best flags stand beside the one against a plain loop, as the benchmark wrote them."""
    table = (DOCS / "benchmarks.md").read_text()
    measured = dict(re.findall(r"^\| CPU: against (.+?) \| [\d.]+ \| ([\d.]+) ", table, re.MULTILINE))
    lightning, accelerate = measured["Lightning's best flags"], measured["Accelerate's best flags"]
    plain = f"{float(measured['the kuangliu loop']):.1f}"
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ResNet-18"))
    assert re.findall(r"\b\d\.\d+\b", row) == [lightning, accelerate, plain]


@pytest.mark.parametrize("task", TASKS)
def test_a_page_for_one_task_is_short(task: str) -> None:
    assert len((DOCS / f"{task}.md").read_text().split()) < MOST_WORDS_OF_A_TASK


def test_no_entry_of_the_changelog_stands_twice() -> None:
    """Two branches that both move entries merge without a conflict, and leave each entry twice."""
    entries = [" ".join(entry.split()) for entry in re.split(r"^(?:- |#+ .*\n)", changelog(), flags=re.MULTILINE)]
    assert [entry for entry, count in Counter(entries).items() if entry and count > 1] == []
    assert changelog().count("## [Unreleased]") == 1


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()
