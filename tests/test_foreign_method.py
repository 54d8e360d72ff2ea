"""The contract test takes a method of another package, a shipped one with another score, as its docs say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PACKAGE = '''
from dataclasses import dataclass

from lit_compress.methods.magnitude import Magnitude
from lit_compress.stages.unstructured import Score, Unstructured
from lit_compress.utils.sharding import local


class SmallestStay(Score):
    """1 / (1 + |W|)."""

    def before_ranking(self, scores, weights):
        for score, weight in zip(scores, weights, strict=True):
            local(score).copy_(1 / (1 + local(weight).detach().abs()))


@dataclass(frozen=True)
class MineSettings(Unstructured):
    """Schedule of the pruning."""

    def make_score(self) -> Score:
        return SmallestStay()


class Mine(Magnitude):
    """Prune the largest weights."""

    prune: MineSettings = MineSettings()
'''


@pytest.mark.slow
def test_a_method_of_another_package_goes_through_the_contract(tmp_path):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text(PACKAGE)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "tests/test_contract.py", "--method", "mypackage.Mine", "-m", "not slow",
               "-p", "no:cacheprovider", "-p", "no:xdist", "-rA"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "PASSED tests/test_contract.py::test_budget_is_reached_in_the_exported_file[mypackage.Mine]" in done.stdout
