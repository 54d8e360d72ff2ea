"""The run on which the tests of the commands look."""

from __future__ import annotations

import pytest
from mistakes import fit

from lit_compress.__main__ import main


@pytest.fixture(scope="session")
def run(short_run, tmp_path_factory):
    """A finished SVD run with its checkpoints, which no test changes."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.MonkeyPatch.context() as patch:  # tests give its checkpoints where they do not belong
        patch.setattr("lit_compress.run.folder.Run.remove_checkpoints", lambda run, stage: None)
        main(fit(short_run, folder))
    return folder


@pytest.fixture
def words(run, tiny_data):
    """MODEL and what names its data."""
    return [str(run / "dense" / "net")], [
        "--data.task",
        "sst2",
        "--data.path",
        str(tiny_data),
        "--data.batch_size",
        "8",
    ]
