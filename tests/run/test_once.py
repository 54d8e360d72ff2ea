"""A tiny fit does nothing twice: it makes, loads and searches models as often as it must."""

from __future__ import annotations

import functools
import sys
import traceback
from collections import Counter, defaultdict

import pytest
import transformers

from lit_compress.__main__ import main
from lit_compress.cli import commands  # noqa: F401  all modules of a fit, for what they import of each other
from lit_compress.data.datamodule import DataModule
from lit_compress.methods import LPAF
from lit_compress.models import backbones, sites, storage

# the fourth load is of the export; of the five models four are empty, and one is the backbone's
MOST = {"method": 2, "data": 2, "model": 5, "empty_net": 4, "load_net": 4, "search_sites": 5}


@pytest.fixture
def calls(monkeypatch):
    """Name of a function -> lines of the package that called it, with their numbers; filled by a test."""
    counts = defaultdict(Counter)

    def counted(function, name):
        @functools.wraps(function)
        def call(*args, **options):
            stack = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
            counts[name][" < ".join(stack[:-7:-1])] += 1
            return function(*args, **options)

        return call

    modules = [module for name, module in sys.modules.items() if name.startswith("lit_compress.")]
    for function in (backbones.empty_net, backbones.load_net, storage.load_net, sites.search_sites):
        for module in modules:
            if vars(module).get(function.__name__) is function:
                monkeypatch.setattr(module, function.__name__, counted(function, function.__name__))
    models = transformers.BertForSequenceClassification
    for kind, method, name in ((LPAF, "__post_init__", "method"), (DataModule, "__init__", "data"),
                               (models, "__init__", "model")):  # fmt: skip
        monkeypatch.setattr(kind, method, counted(getattr(kind, method), name))
    return counts


def test_a_tiny_fit_makes_loads_and_searches_models_only_as_often_as_it_must(calls, short_run, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)  # another process loads for it
    options = ["--model.density", "0.5", "--model.prune.epochs", "2", "--run_dir", str(tmp_path / "run")]
    main(["fit", "--model", "LPAF", *short_run, *options])
    for name, most in MOST.items():
        assert 0 < calls[name].total() <= most, "\n".join(f"{n} {name} < {lines}" for lines, n in calls[name].items())
