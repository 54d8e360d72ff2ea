"""The script that breaks places and counts what the tests notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reliability import mutations
from benchmarks.reliability.mutations import chosen, first_failure, looking_at, places_of

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


def test_who_looks_at_a_file() -> None:
    mirror, room, rest = looking_at(mutations.ROOT / "lit_compress/numerics/kronecker.py")
    assert mirror == ["tests/numerics/test_kronecker.py"] and not set(mirror) & {*room, *rest}
    assert all(test.startswith("tests/numerics/") for test in room) and rest[-1] == "tests/test_contract.py"


def test_a_test_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_good(): pass\n\n\ndef test_bad(): assert not 1\n")
    assert first_failure(tmp_path, ["test_one.py"]) == "FAILED test_one.py::test_bad"
    assert first_failure(tmp_path, ["test_one.py::test_good"]) is None
