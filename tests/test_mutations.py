"""The script that breaks places and counts what the tests notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage import CoverageData

from benchmarks.reliability import mutations
from benchmarks.reliability.mutations import chosen, first_failure, mirror, places_of, who_runs

CODE = '''"""A text with 1 < 2."""
LIMIT = 3
def within(x: int, low: int = 0) -> bool:
    """Return whether 0 < x."""
    if not x and low:
        return False
    return (x + 1) * 2 < LIMIT
'''


def test_every_place_is_broken_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    path = tmp_path / "code.py"
    path.write_text(CODE)
    lines = [str(place).partition(": ")[2].partition(" -> ")[2] for place in places_of(path)]
    assert lines == [
        "if x and low:", "if not x or low:", "return True", "return (x - 1) * 2 < LIMIT", "return (x + 2) * 2 < LIMIT",
        "return (x + 1) * 3 < LIMIT", "return (x + 1) * 2 <= LIMIT",
    ]  # fmt: skip
    for place in places_of(path):
        compile(place.broken(), "code.py", "exec")
        assert place.broken() != CODE


def test_places_of_all_rooms_are_chosen() -> None:
    names = {str(place) for place in chosen(20, 0)}
    assert len(names) > 15 and {name.split("/")[1] for name in names} == set(mutations.ROOMS)


def test_who_runs_a_line(tmp_path: Path) -> None:
    file = mutations.ROOT / "lit_compress/numerics/ranks.py"
    place = next(place for place in places_of(file) if len(place.lines) == 1)
    seen = CoverageData(str(tmp_path / ".coverage"))
    others = [f"tests/{name}::test_{number}" for name in ("cli/test_a.py", "numerics/test_b.py") for number in range(3)]
    for name in (f"{mirror(file)}::test_c", *others, "tests/run/test_d.py::test_of_another_line"):
        seen.set_context(f"{name}|run")
        seen.add_lines({str(file): [place.lines[0] + ("another" in name)]})
    own, found = who_runs(place, seen)
    assert own == ["tests/numerics/test_ranks.py::test_c"] and {*found} == {*others}
    assert [name.split("/")[1] for name in found] == ["numerics"] * 3 + ["cli"] * 3


def test_a_test_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_good(): pass\n\n\ndef test_bad(): assert not 1\n")
    assert first_failure(tmp_path, ["test_one.py"]) == "FAILED test_one.py::test_bad"
    assert first_failure(tmp_path, ["test_one.py::test_good"]) is None
