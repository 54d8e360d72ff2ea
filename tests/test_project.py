"""The files around the package: one version, and every package that is imported is declared and pinned."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_every_section_of_the_changelog_is_short_and_has_a_version_and_a_date():
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert titles and len(titles) == len(set(titles))
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title) for title in titles), titles
    assert all(len(section.strip().splitlines()) <= 40 for section in sections)


def test_all_checks_are_the_same():
    """The workflow, the hook before commits and CI call the targets of the Makefile."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["make"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    targets = re.findall(r"^(\w+): \$\((?:READY|TESTED)\)", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(targets) == set(workflow["strategy"]["matrix"]["target"])
    assert workflow["steps"][-1]["run"] == "make ${{ matrix.target }}"
    assert "make lint" in [hook["entry"] for hook in hooks]
    assert (ROOT / ".ci" / "run").read_text().endswith("make lint\nmake docs\nmake test\n")


OTHER_NAMES = {"griffe": "griffelib", "yaml": "pyyaml", "sklearn": "scikit-learn"}  # imported -> installed
OWN = {"lit_compress", "benchmarks", *(path.stem for path in (ROOT / "tests").rglob("*.py")),
       *(path.name for path in (ROOT / "tests").iterdir() if path.is_dir())}  # fmt: skip


def declared(*extras: str) -> dict[str, Requirement]:
    """Return the requirements of the package and of some extras, by name; an extra may name another one."""
    found: dict[str, Requirement] = {}
    for line in [
        *PROJECT["project"]["dependencies"],
        *(line for extra in extras for line in PROJECT["project"]["optional-dependencies"][extra]),
    ]:
        requirement = Requirement(line)
        found |= declared(*requirement.extras) if requirement.name == "lit_compress" else {}
        found[requirement.name.lower().replace("_", "-")] = requirement
    return found


def imported(node: ast.AST, needed: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield the packages that a file imports, and whether the file cannot be imported without them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.partition(".")[0], needed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield str(child.module).partition(".")[0], needed
        yield from imported(child, needed and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def undeclared(code: str, required: set[str], optional: set[str]) -> set[str]:
    """Return the packages that code imports and that are not declared; ``optional`` are for functions only."""
    return {
        name for name, needed in imported(ast.parse(code))
        if name not in sys.stdlib_module_names and name not in OWN
        and OTHER_NAMES.get(name, name.replace("_", "-")) not in required | (set() if needed else optional)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("lit_compress", ()), ("tests", ("dev",)), ("benchmarks", ("benchmarks",)), ("docs", ("docs",))],
)
def test_every_imported_package_is_declared(folder, extras):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    required, optional = set(declared(*extras)), set(declared("onnx", "openvino", "wandb", "gguf"))
    missing = {str(path): names for path in files if (names := undeclared(path.read_text(), required, optional))}
    assert not missing


@pytest.mark.parametrize(
    ("code", "names"),
    [("import yaml, scipy.stats", {"scipy"}), ("from onnx import helper", {"onnx"}),
     ("def f():\n    import onnx, polars", {"polars"}), ("import os\nfrom lit_compress.utils import files", set())],
)  # fmt: skip
def test_an_undeclared_package_is_seen(code, names):
    assert undeclared(code, set(declared()), set(declared("onnx"))) == names


# what the registry's build of torch brings along for its GPUs, which the CPU's build does without
FOR_GPUS = re.compile(r"(nvidia|cuda)-.*|triton")


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt by name."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    assert len(lines) == len(found) == len({canonicalize_name(name) for name in found})
    return {canonicalize_name(name): pin for name, pin in found.items()}


def pulled_in(*extras: str) -> set[str]:
    """Return the names of all installed packages that the package and some extras need, by way of others too."""
    waiting, seen = list(declared(*extras).values()), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *requirement.extras]:
            if name != "lit-compress" and (name, extra) not in seen:
                seen.add((name, extra))
                wanted = map(Requirement, metadata.requires(name) or ())
                waiting += [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def test_every_declared_package_has_a_tested_version():
    tested = pins()
    for name, requirement in declared("dev", "benchmarks").items():
        if name != "lit-compress":
            assert requirement.specifier.contains(tested[name]), f"{requirement} is not tested with {tested[name]}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="made for Python 3.11")
def test_the_lock_has_every_package_that_is_pulled_in_and_no_other():
    """After a change in pyproject.toml `make lock` writes it again."""
    assert {name for name in pins().keys() ^ pulled_in("dev") if not FOR_GPUS.fullmatch(name)} == set()


def test_the_lock_names_no_place():
    assert not re.search(r"://|--|@", (ROOT / "constraints.txt").read_text())


def test_actions_are_named_by_commit():
    workflows = [path.read_text() for path in (ROOT / ".github" / "workflows").iterdir()]
    named = re.findall(r"uses: (\S+)", "".join(workflows))
    assert named and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in named)


def test_every_file_of_tests_has_a_name_of_its_own():
    """Pytest imports two files of one name as one module: alone both pass, together neither is collected."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


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
