"""The files around the package: one version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from lit_compress.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_one():
    (newest, date), *_ = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (newest, date) == (__version__, str(cited["date-released"]))
    assert cited["version"] == __version__
    assert (
        PROJECT["tool"]["hatch"]["version"]["path"] == "lit_compress/version.py" and "version" not in PROJECT["project"]
    )


def test_every_section_of_the_changelog_has_a_version_and_a_date():
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert sections and len(sections) == len(set(sections))
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", section) for section in sections), sections
