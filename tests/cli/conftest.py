"""The run on which the tests of the commands look."""

from __future__ import annotations

import functools
import shutil
from collections import Counter

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from mistakes import fit

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule


@pytest.fixture(scope="session")
def counts():
    """How often the run built its data and parsed its method."""
    return Counter()


def counted(patch, counts, name, kind, function):
    """Let ``counts`` count the calls of a function of a class or module."""
    inner = getattr(kind, function)

    @functools.wraps(inner)
    def counting(*args, **kwargs):
        counts[name] += 1
        return inner(*args, **kwargs)

    patch.setattr(kind, function, counting)


@pytest.fixture(scope="session")
def run(short_run, tmp_path_factory, counts):
    """A finished SVD run with its checkpoints, which no test changes."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.MonkeyPatch.context() as patch:  # tests give its checkpoints where they do not belong
        patch.setattr("lit_compress.run.folder.Run.remove_checkpoints", lambda run, stage: None)
        counted(patch, counts, "data", DataModule, "__init__")
        counted(patch, counts, "parsed", LightningArgumentParser, "instantiate_classes")
        main(fit(short_run, folder))
    return folder


@pytest.fixture
def model(run, tmp_path):
    """The fine-tuned net of the run as a folder that no run made."""
    folder = shutil.copytree(run / "dense" / "net", tmp_path / "model")
    for name in ("structure.json", "manifest.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def words(run, tiny_data):
    """MODEL and what names its data."""
    data = ["--data.task", "sst2", "--data.path", str(tiny_data), "--data.batch_size", "8"]
    return [str(run / "dense" / "net")], data
