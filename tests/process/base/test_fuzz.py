"""The first cases of the fuzzer (tests/fuzz/); `make fuzz` runs more."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

CASES = 2_000


def test_no_mutated_input_ends_in_anything_but_a_result_or_an_error_with_a_message() -> None:
    argv = [sys.executable, "-m", "tests.fuzz", "--seed", "1", "--cases", str(CASES)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=500, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES} cases with seed 1: 0 kinds of findings" in done.stdout
