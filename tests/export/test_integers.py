"""Programs of integers (integers_cases.py), in a process of its own.

In one process with many other tests NNCF's ways to 4 bits left an object of Python broken, and a later test crashed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


# over 10 s: a process of its own for libraries that leave it broken
@pytest.mark.slow
def test_programs_of_integers():
    pytest.importorskip("nncf")
    file = Path(__file__).with_name("integers_cases.py")
    line = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    said = subprocess.run(line, capture_output=True, text=True, cwd=file.parents[2])
    assert said.returncode == 0, said.stdout[-3000:]
