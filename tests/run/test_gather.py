"""The table of a comparison on the screen."""

from __future__ import annotations

import json

from lit_compress.run.gather import _shown
from lit_compress.run.workers import Layout


def test_a_density_that_is_not_as_asked_is_told(tmp_path):
    for name, density in (("a", 0.0337), ("b", 0.0277), ("c", 0.0999)):
        (tmp_path / name).mkdir()
        report = {"compressed": {"metric": 0.5, "density": density}}
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    cells = [{"run": name, "budget": "density=0.1", "status": "done"} for name in "abc"]
    assert _shown(cells[:2], Layout(tmp_path)) == "0.5000 ± 0.0000 (2), stored 0.031"
    assert _shown(cells[2:], Layout(tmp_path)) == "0.5000"
