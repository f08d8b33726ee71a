"""Run the tests that need a Slurm in other Debian releases, and write what came of it into docs/slurm.md.

As root: `.venv/bin/python tests/slurm_releases.py [--failed] RELEASE...`; testbed/in_release makes a missing release.
With `--failed` only the tests that the page names as failed are run again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs/slurm.md"
ENTER = HERE / "testbed/in_release"
ORDER = ("bullseye", "bookworm", "trixie", "sid")
NAMES = (
    "rack",
    "slurm",
    "worker_rack",
    "doctor_rack",
    "entry_rack",
    "storage_rack",
    "launch_table_rack",
    "batch_script",
)
"""Of the files: test_NAME*.py in any room, and those of other commands on Slurm."""
BEGIN, END = "<!-- releases: written by make test-slurm -->", "<!-- end of releases -->"
HEAD = "| Debian | Slurm | Python of the tests | passed | failed | skipped | on |\n|---|---|---|---|---|---|---|"


@dataclass(kw_only=True)
class Outcome:
    """What came of one release's tests."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Test, as pytest names it -> the last line of why."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> how many."""


def main(releases: list[str]) -> int:
    """Test each release; 1 when a test failed."""
    failed, again = False, releases[:1] == ["--failed"]
    for release in releases[again:]:
        outcome = run_failed(release, PAGE.read_text()) if again else run_tests(release)
        words = f"{outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped.total()} skipped"
        sys.stdout.write(f"{release}: {words}\n")
        PAGE.write_text(write_row(PAGE.read_text(), release, describe(release), outcome))
        failed |= bool(outcome.failed)
    return int(failed)


def find_files() -> list[str]:
    """List the test files that have to do with Slurm."""
    found = {path for name in NAMES for path in HERE.rglob(f"test_{name}*.py")} | set(HERE.rglob("test_*_slurm.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def run_tests(release: str) -> Outcome:
    """Run the files side by side, those that start a crowd of ranks alone, and once more alone what failed."""
    files = find_files()
    side_by_side = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    outcome = run_pytest(release, [*side_by_side, "-m", "not crowd", *files])
    crowd = run_pytest(release, ["-m", "crowd", *files])
    outcome.passed += crowd.passed
    outcome.failed |= crowd.failed
    outcome.skipped += crowd.skipped
    if outcome.failed:
        again = run_pytest(release, list(outcome.failed))
        outcome.passed += again.passed
        outcome.failed = again.failed
    return outcome


def run_failed(release: str, page: str) -> Outcome:
    """Run the tests again that the page names as failed; what it says of the others stays."""
    row = re.search(rf"^\| {release} \|.*\| (\d+) \| \d+ \| \d+ \| [0-9-]+ \|$", page, re.MULTILINE)
    words = re.search(rf"^\* {release}: .*$", page, re.MULTILINE)
    if row is None or words is None:
        raise SystemExit(f"{release}: {PAGE} names no test that failed")
    names = [_find_test(name) for name in re.findall(r"`([^`]+)` failed", words[0])]
    outcome = run_pytest(release, names)
    outcome.passed += int(row[1])
    for count, reason in re.findall(r"(\d+) skipped: ([^;\n]+)", words[0]):
        outcome.skipped[reason] += int(count)
    return outcome


def run_pytest(release: str, arguments: list[str]) -> Outcome:
    """Run pytest in a release; what it says goes to the terminal."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        pytest = [str(ROOT / ".venv/bin/pytest"), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [str(ENTER), release, *pytest, *arguments]
        everything = {**os.environ, "CLUSTERDDP_TEST_SLURM": "all", "CLUSTERDDP_TEST_RACK": "required"}
        code = subprocess.run(command, check=False, cwd=ROOT, env=everything).returncode
        if code not in {0, 1, 5} or not report.exists():
            raise SystemExit(f"{release}: pytest left with {code}")
        return read_report(report.read_text())


def read_report(text: str) -> Outcome:
    """Read a report in JUnit's form."""
    outcome = Outcome()
    for case in ET.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        skipped = case.find("skipped")
        broken = [child for child in case if child.tag in {"failure", "error"}]
        if broken:
            outcome.failed[name] = " ".join((broken[0].get("message") or "").split())[:100]
        elif skipped is not None:
            outcome.skipped[skipped.get("message") or "?"] += 1
        else:
            outcome.passed += 1
    return outcome


def describe(release: str) -> tuple[str, str]:
    """Return the versions of Slurm and of the Python that ran the tests."""
    script = "slurmctld -V; .venv/bin/python -c 'import sys; print(sys.version.split()[0])'"
    done = subprocess.run(
        [str(ENTER), release, "sh", "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    slurm, python = done.stdout.splitlines()[-2:]
    return slurm.split()[-1], python


def write_row(page: str, release: str, versions: tuple[str, str], outcome: Outcome) -> str:
    """Put a release's row, and what failed and was skipped there, into the page; the other releases' stay."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    words = {match[1]: match[0] for match in re.finditer(r"^\* (\w+): .*$", table, re.MULTILINE)}
    slurm, python = versions
    date = time.strftime("%Y-%m-%d", time.gmtime())
    counts = f"{outcome.passed} | {len(outcome.failed)} | {outcome.skipped.total()}"
    rows[release] = f"| {release} | {slurm} | {python} | {counts} | {date} |"
    notes = [f"`{_short(name)}` failed: {why.replace(';', ',')}" for name, why in sorted(outcome.failed.items())]
    notes += [f"{count} skipped: {reason}" for reason, count in sorted(outcome.skipped.items())]
    words[release] = f"* {release}: {'; '.join(notes)}" if notes else ""
    lines = [HEAD, *(rows[name] for name in ORDER if name in rows), ""]
    lines += [words[name] for name in ORDER if words.get(name)]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines).rstrip() + f"\n\n{END}{after}"


def _find_test(short: str) -> str:
    """Return the name of a test that the page names by its file's name."""
    name, _, test = short.partition("::")
    [path] = HERE.rglob(name)
    return f"{path.relative_to(ROOT)}::{test}"


def _short(name: str) -> str:
    """Name a test by its file's name; its parameters may hold slashes, too."""
    path, _, test = name.partition("::")
    return f"{Path(path).name}::{test}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
