"""docs/from_python.ipynb is a notebook, and its cells say what stands below them."""

from __future__ import annotations

import json

from notebook import PATH, run, texts
from reading import skeleton


def test_it_is_a_notebook():
    """As the schema of nbformat 4.5 wants it; the package nbformat is not needed to read one."""
    found = json.loads(PATH.read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5) and set(found) == {
        "cells", "metadata", "nbformat", "nbformat_minor"
    }  # fmt: skip
    assert found["metadata"]["kernelspec"]["language"] == "python"
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in found["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code
        assert all(isinstance(line, str) for line in cell["source"])
        for output in cell.get("outputs", ()):
            own = {"name", "text"} if output["output_type"] == "stream" else {"execution_count", "metadata", "data"}
            assert set(output) == {"output_type"} | own


def test_its_cells_say_what_stands_below_them(tmp_path, monkeypatch):
    """But for measured numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    stored = json.loads(PATH.read_text(encoding="utf-8"))
    for before, after in zip(stored["cells"], run(stored)["cells"], strict=True):
        if before["cell_type"] == "code":
            assert [skeleton(line) for line in texts(after)] == [skeleton(line) for line in texts(before)]
