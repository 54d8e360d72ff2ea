"""README.md and docs/: every option and link is there, every page has what it must have."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from pages import PAGES, ROOT, blocks, items, lit_compress_words, python_blocks
from reading import options_of

from lit_compress import methods
from lit_compress.data.datamodule import DataModule


def test_options_exist():
    known = set()
    for name in methods.__all__:
        known |= nested("model", options_of(getattr(methods, name)))
    known |= nested("data", options_of(DataModule)) | nested("trainer", options_of(pl.Trainer))
    known |= nested("trainer.logger", options_of(CSVLogger) | options_of(MLFlowLogger))
    for page in PAGES:
        found = set(re.findall(r"--((?:model|data|trainer)\.[a-z_0-9.]*[a-z_0-9])", page.read_text(encoding="utf-8")))
        assert found - {"model.densty"} <= known, f"{page.name}: {sorted(found - known)}"


def nested(prefix: str, options: dict[str, Any]) -> set[str]:
    """Return the names of options and of the fields of those that are dataclasses."""
    found = {f"{prefix}.{name}" for name in options}
    for name, default in options.items():
        if is_dataclass(default):
            found |= nested(f"{prefix}.{name}", {field.name: getattr(default, field.name) for field in fields(default)})
    return found


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


WANTED = ("getting_started", "methods", "tasks_and_data", "outputs", "distributed", "resume", "export", "add_a_method",
          "add_a_task", "compare", "python", "add_an_architecture", "glossary", "house", "benchmarks")  # fmt: skip


def test_every_page_is_there():
    for name in WANTED:
        assert ROOT / "docs" / f"{name}.md" in PAGES
    linked = set(re.findall(r"\(docs/(\w+)\.md", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.stem for page in PAGES[1:]}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), f"{page.name}: no {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: no heading {target}"


def test_every_command_is_known():
    """Nothing is skipped: each command is of lit_compress or one of the few that are only checked."""
    others = {"make", "pip", "tensorboard"}
    found = [item for page in PAGES for item in items(page) if item.language == "bash"]
    assert found
    for item in found:
        assert lit_compress_words(item.text) or item.text.split()[0] in others, f"{item.where}: {item.text}"


def test_the_map_has_every_room():
    text = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    rooms = set(re.findall(r"^  (\w+)/ ", text, flags=re.M))
    assert rooms == {path.parent.name for path in (ROOT / "lit_compress").glob("*/__init__.py")}


def test_blocks_have_a_language():
    for page in PAGES:
        for start, language, _ in blocks(page):
            assert language in ("prose", "bash", "console", "python", "text", "yaml", "end"), f"{page.name}:{start}"


def test_every_method_has_a_section():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name in set(methods.__all__) - {"Method"}:
        assert f"`{name}`" in text, name
    _, *sections = text[text.index("## What all methods share") :].split("\n## ")
    assert sections
    for section in sections:
        for part in ("```text", "python -m lit_compress fit", "Reached here", "Not for"):
            assert part in section, f"{section.partition(chr(10))[0]}: no '{part}'"


TERMS = ("site", "density", "stage", "teacher", "export", "recipe", "rank", "factor", "gate", "score", "sensitivity",
         "Fisher information", "calibration", "distillation", "structure", "budget", "row", "neuron", "head", "kept",
         "stored", "merged", "latency", "dev set", "warm-up", "perplexity", "tied", "hard concrete", "Lagrangian",
         "residual stream", "sub-layer", "block", "backbone", "report", "run", "task", "method")  # fmt: skip


def test_glossary_has_every_term():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    titles = [title for line in re.findall(r"^### (.*)$", text, flags=re.M) for title in line.split(", ")]
    assert set(TERMS) <= set(titles)
    assert len(titles) == len(set(titles))
    heads = re.findall(r"^### (.*)$", text, flags=re.M)
    assert heads == sorted(heads, key=str.lower)


def test_the_record_of_a_task_is_one():
    (code,) = python_blocks("add_a_task")
    task = eval(code, {"Task": type(DataModule("sst2").record)})
    assert task.num_labels == 6


def test_the_record_of_an_architecture_is_python():
    module = importlib.import_module("lit_compress.models.architectures")
    shown = {}
    for code in python_blocks("add_an_architecture"):
        shown |= eval(compile(f"{{{code}}}", "add_an_architecture.md", "eval"), vars(module).copy())
    assert shown == {name: module.ARCHITECTURES[name] for name in ("qwen3", "modernbert")}


def test_the_table_of_recipes_is_complete():
    page = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| recipe \|.*\n\|---\|---\|\n((?:\|.*\n)+)", page, flags=re.M)
    shown = {}
    for line in table.splitlines():
        names, tasks = (set(re.findall(r"\w+", cell)) for cell in line.strip("|").split("|"))
        shown |= dict.fromkeys(names, tasks)
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")}
    assert shown == {name: set(recipe["tasks"]) for name, recipe in recipes.items() if "tasks" in recipe}


def test_published_tables_of_results_have_no_holes():
    for page in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("| method, density"))
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:] if line[:1] == "|"]
        table = rows[: next((number for number, row in enumerate(rows) if len(row) != len(rows[0])), len(rows))]
        assert len(table) > 4 and all(cell and "not run" not in cell for row in table for cell in row), page
