"""If the output is a file, every long phase of a command has a line at its end."""

from __future__ import annotations

import re

import pytest

from lit_compress.__main__ import main
from lit_compress.utils import progress


@pytest.fixture
def phases(monkeypatch, capsys):
    """Return a function that runs a command in which every phase counts as long, and returns their names in order."""
    monkeypatch.setattr(progress, "LONG", 0.0)

    def run(*words):
        capsys.readouterr()
        main([str(word) for word in words])
        lines = capsys.readouterr().err.splitlines()
        return [m[1] for line in lines if (m := re.fullmatch(r"(.+): ended after .+", line))]

    return run


def test_factorize(phases, run, tiny_data, tmp_path):
    data = ["--data.task", "sst2", "--data.path", tiny_data, "--data.batch_size", 8]
    found = phases("factorize", run / "dense" / "net", tmp_path / "out", *data, "--density", 0.5)
    check = "check the export in another process"
    work = {"Kronecker factors", "singular values", "factorize", "compare", "evaluate", check, "measure"}
    assert work | {"measure the latency"} <= set(found)


def test_validate(phases, run):
    assert phases("validate", run) == ["evaluate"]


def test_fit(phases, short_run, tmp_path):
    found = phases("fit", "--model", "SVD", "--model.density", 0.5, *short_run, "--run_dir", tmp_path / "run")
    for title in ("SVD 1/2 dense", "SVD 2/2 retrain"):
        assert found.count(f"{title}: training") == 1
        assert found.count(f"{title}: validation") == 3  # before training and after two epochs
