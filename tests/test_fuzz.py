"""The first cases of the fuzzer (tests/fuzz.py); `make fuzz` runs more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASES = 2_000


def test_no_mutated_input_ends_in_anything_but_a_result_or_an_error_with_a_message() -> None:
    program = Path(__file__).with_name("fuzz.py")
    argv = [sys.executable, str(program), "--seed", "1", "--cases", str(CASES)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES} cases with seed 1: 0 kinds of findings" in done.stdout
