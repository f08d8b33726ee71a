"""How long tests wait for what must happen, on machines that others use too."""

from __future__ import annotations

PATIENCE = 4
"""Tests give a quiet machine's time; waiting longer costs nothing where it happens, and a slow machine is no failure.

Where the time itself is promised (test_slurm_show.py, test_ssh_kills.py) it is not multiplied.
"""
