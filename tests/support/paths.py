"""Where the checkout and the data of its tests lie."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
JOBS = ROOT / "jobs"
GOLDEN = TESTS / "golden"
ENTRIES = TESTS / "entries"
CLUSTERS = TESTS / "clusters"
