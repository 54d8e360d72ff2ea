"""No metric on README.md and docs/ is typed by hand: each stands in a table that is made of the benchmarks' results.

Looked at are numbers with one digit after the point from 30 to 100, as metrics in percent are written; in a section that
links to studies only their tables count. A finding of a study may also cite a value of a JSON that no table shows.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, blocks

sys.path.insert(0, str(ROOT))

from benchmarks import tables

METRIC = r"(?<![\d./=-])\b([3-9]\d\.\d)\b(?![\d.])"
FINDINGS = sorted((ROOT / "benchmarks").glob("*/findings.md"))


@cache
def of_tables() -> dict[str, set[str]]:
    """Return the numbers of the tables of every study, and of all on one page (``benchmarks``)."""
    found = {}
    for path, text in tables.pages().items():
        findings = path.parent / "findings.md"
        made = text.replace(findings.read_text().strip(), "") if findings.is_file() else text
        found[path.parent.name] = set(re.findall(r"\d+\.\d+", made))
    return found


def sections(page: Path) -> list[str]:
    """Return the prose of every section."""
    prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
    return re.split(r"^## ", prose, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_of_a_page_stand_in_the_tables(page):
    for section in sections(page):
        studies = [name for name in re.findall(r"benchmarks/(\w+)/", section) if name in of_tables()]
        known = set().union(*(of_tables()[name] for name in studies or of_tables()))
        missing = [number for number in re.findall(METRIC, section) if number not in known]
        title = section.partition("\n")[0]
        assert not missing, f"{page.name}, {title}: no table of {studies or 'any study'} has {', '.join(missing)}"


def values(content: Any) -> set[str]:
    """Return the numbers in a result as percent and as they are, with one digit after the point."""
    if isinstance(content, float):
        return {f"{content:.1f}", f"{100 * content:.1f}"}
    items = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return set().union(*map(values, items))


@pytest.mark.parametrize("page", FINDINGS, ids=lambda page: page.parent.name)
def test_metrics_of_findings_stand_in_tables_or_results(page):
    numbers = re.findall(METRIC, page.read_text())
    missing = [number for number in numbers if number not in of_tables()[page.parent.name]]
    if missing:
        known = set().union(*(values(json.loads(path.read_text())) for path in page.parent.glob("results/**/*.json")))
        missing = [n for n in missing if n not in known | set().union(*of_tables().values())]
    assert not missing, f"{page.parent.name}: {', '.join(missing)}"
