"""docs/from_python.ipynb is a notebook, and its cells say what stands below them."""

import json

import pytest
from notebook import PATH, run, texts
from pages import skeleton


@pytest.mark.slow
def test_its_cells_say_what_stands_below_them(tmp_path, monkeypatch):
    """But for measured numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    stored = json.loads(PATH.read_text(encoding="utf-8"))
    for before, after in zip(stored["cells"], run(stored)["cells"], strict=True):
        if before["cell_type"] == "code":
            assert [skeleton(line) for line in texts(after)] == [skeleton(line) for line in texts(before)]
