"""The wheel has everything that the package reads beside its code."""

import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]


def test_templates_and_recipes_are_in_the_wheel(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = [
        path for path in (ROOT / "lit_compress").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert any(path.name == "card.md.jinja" for path in beside)
    assert {path.relative_to(ROOT).as_posix() for path in beside} <= names
    recipes = {f"lit_compress/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert recipes and recipes <= names
