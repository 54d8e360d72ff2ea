"""The contract test takes a method of another package, a shipped one with another score, as its docs say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parents[1]

PACKAGE = '''
from lit_compress.methods.baselines import Magnitude
from lit_compress.stages.unstructured import Score, UnstructuredPruning
from lit_compress.utils.sharding import local


class SmallestStay(Score):
    """1 / (1 + |W|)."""

    def before_ranking(self, scores, weights):
        for score, weight in zip(scores, weights, strict=True):
            local(score).copy_(1 / (1 + local(weight).detach().abs()))


class Mine(Magnitude):
    """Prune the largest weights."""

    def own_stages(self):
        return [UnstructuredPruning(self.prune, self.density, SmallestStay())]
'''


def contract(environment: dict[str, str], folder: Path) -> None:
    """Run the contract test in this process, a fork that has imported neither the tests nor the method."""
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    os.chdir(ROOT)
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 1)
    words = ["--method", "mypackage.Mine", "-k", "not (device or killed or processes)", "-p", "no:cacheprovider", "-p",
             "no:xdist", "-rA"]  # fmt: skip
    sys.exit(int(pytest.main(["tests/test_contract.py", *words])))


def test_a_method_of_another_package_goes_through_the_contract(tmp_path):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text(PACKAGE)
    process = processes._CONTEXT.Process(target=contract, args=(dict(os.environ), tmp_path))
    process.start()
    process.join()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said[-3000:]
    assert "PASSED tests/test_contract.py::test_budget_is_reached_in_the_exported_file[mypackage.Mine]" in said
