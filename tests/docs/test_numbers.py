"""The measured numbers on README.md and in docs/ are those of stored results.

That each is the number that its result has is tested with all generated pages in tests/test_benchmarks.py.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks

from benchmarks import marks

METRIC = r"(?<![\d./=,-])(?:[3-9]\d|\d{3})\.\d\b(?![\d.x])"  # as metrics in percent and perplexities are written
SP3 = "comparison/results/sst2_4000/sp3-density=0.1-seed=1-rate=0.0003.json"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_metric_has_a_source(page: Path) -> None:
    prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
    listed = Counter(number for number, _ in marks.numbers().get(str(page.relative_to(ROOT)), []))
    typed = Counter(re.findall(METRIC, marks.TABLE.sub("", prose)))
    assert typed <= listed, f"{page.name}: {typed - listed} have no source in benchmarks/numbers.yaml"


def test_a_changed_result_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree((marks.HERE / SP3).parent, (tmp_path / SP3).parent)
    monkeypatch.setattr(marks, "HERE", tmp_path)
    page = "At 186.1 and 6.1, SP3 has 86.1 and 9,000.25 of 86.1."
    listed = [("86.1", "comparison/sst2_4000/sp3-density=0.1-*"), ("9,000.25", "paper")]
    assert marks.filled(page, listed) == (page, listed)
    result = json.loads((tmp_path / SP3).read_text())
    result["compressed"]["metric"] = 0.5
    (tmp_path / SP3).write_text(json.dumps(result))
    assert marks.filled(page, listed) == (page.replace("has 86.1", "has 50.0"), [("50.0", listed[0][1]), listed[1]])
    with pytest.raises(ValueError, match=r"86\.1 .* is not behind 9,000\.25"):
        marks.filled(page[:-5], [listed[1], listed[0]])


def test_a_mean_a_range_a_row_and_the_decimals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "HERE", tmp_path)
    folder = tmp_path / "study" / "results"
    folder.mkdir(parents=True)
    for seed, value in enumerate((0.5, 0.75)):
        rows = [{"of": "svd", "ratio": 0.1, "x": 1000 * value}, {"of": "svd", "ratio": 0.2, "x": "4"}]
        compressed = {"metric": value, "interval": [value, value + 0.0784], "bytes": 2e6 * value}
        made = {"compressed": compressed, "records": [{"a/b": 0}, {"a/b": value}], "rows": rows}
        (folder / f"run-{seed}.json").write_text(json.dumps(made))
    for number, name in {
        "62.50": "study/run-*", "1": "study/run-*:records:-1:a/b", "0.50": "min study/run-*:compressed:metric",
        "75.0": "max study/run-*:compressed:metric%", "625": "study/run-*:rows:ratio=0.1,of=svd:x",
        "2.00": "error study/run-1", "2.0": "error study/run-1:compressed", "1.5": "study/run-1:compressed:bytes MB",
        "4.0": "study/run-1:rows:of=svd,ratio=0.2:x", "377.0": "study/run-1:rows:*:x", "750": "study/run-1:rows:0:x",
    }.items():  # fmt: skip
        blank = re.sub(r"\d", "7", number)
        assert marks.filled(blank, [(blank, name)]) == (number, [(number, name)])
    assert marks.filled("1.5", [("1.5", "max study/run-*:rows:0:x%")])[0] == "75,000.0"


@pytest.mark.parametrize("name", ["sp3/none-*", "none/x", "sp3/sst2-pca-0.06-1:no:key", "sp3/sst2-pca-0.06-1:method",
                                  "most sp3/sst2-pca-0.06-1", "sp3/sst2-pca-0.06-1:records:seed=9:metric"])  # fmt: skip
def test_a_name_that_leads_nowhere_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        marks.filled("1.0", [("1.0", name)])


def test_a_table_is_written_between_its_marks() -> None:
    made = marks.with_tables("before\n<!--comparison.every_task-->\nold\n<!--end-->\nafter\n")
    lines = made.splitlines()
    assert lines[:2] == ["before", "<!--comparison.every_task-->"] and lines[-2:] == ["<!--end-->", "after"]
    assert "old" not in made and "\n".join(lines[2:-2]) in (ROOT / "docs/explanation/benchmarks.md").read_text("utf-8")
