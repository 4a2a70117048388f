"""Mutants of the core, each of which the tests must catch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("mutant_checks.py")


def test_every_mutant_is_caught() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKS.parents[2])
    assert done.returncode == 0, done.stdout[-6000:]
