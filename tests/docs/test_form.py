"""README.md and docs/: every option and link is there, every page has what it must have."""

from __future__ import annotations

import importlib
import importlib.util
import re
from inspect import signature
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from pages import PAGES, ROOT, blocks, items, named, python_blocks

from lit_compress import methods
from lit_compress.cli import catalogue
from lit_compress.data.datamodule import DataModule


def test_options_exist():
    known = {*catalogue.names(), *(f"trainer.logger.{name}" for kind in (CSVLogger, MLFlowLogger)
                                   for name in signature(kind).parameters)}  # fmt: skip
    for page in PAGES:
        found = set(re.findall(r"--((?:model|data|trainer)\.[a-z_0-9.]*[a-z_0-9])", page.read_text(encoding="utf-8")))
        found = {re.sub(r"(optimizer|lr_scheduler)\..*", r"\1", option) for option in found}  # of their classes
        assert found - {"model.densty"} <= known, f"{page.name}: {sorted(found - known)}"


def test_readme_is_short():
    """A stranger reads it in a minute: few lines, few numbers."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    shown = re.sub(r"<!--.*?-->|\]\([^)]*\)|```.*?```|`[^`]*`|^!\[.*$", "", text, flags=re.S | re.M)
    assert len(re.findall(r"(?<![\w.])\d[\d,.]*", shown)) <= 40


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed, left = [], [yaml.safe_load(text[text.index("\nnav:") :])["nav"]]
    while left:
        entry = left.pop()
        left += entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else []
        listed += [entry] if isinstance(entry, str) else []
    pages = [str(path.relative_to(ROOT / "docs")) for path in PAGES[1:]]
    assert sorted(listed) == sorted([*pages, "tutorials/notebook.md"])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    prose = "\n".join(text for _, language, text in blocks(path) if language == "prose")
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.is_file(), f"{path.name}: no {target}"
        assert not text.endswith(".md") or text.endswith(linked.name), f"{path.name}: {text} leads to {linked.name}"
        assert not anchor or anchor in anchors(linked), f"{path.name}: no heading {target}"


def test_no_shell_expands_an_option():
    """Brackets and stars outside of quotes are patterns for file names."""
    for page in PAGES:
        lines = [item.text for item in items(page) if item.language == "bash"]
        prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
        lines += [code for code in re.findall(r"`([^`\n]+)`", prose) if re.search(r"(^| )--[a-z]", code)]
        for line in lines:
            assert not re.search(r"[][{}*?&()]", re.sub(r"'[^']*'|\"[^\"]*\"", "", line)), f"{page.name}: quote {line}"


def test_the_map_has_every_room():
    text = named("house").read_text(encoding="utf-8")
    rooms = set(re.findall(r"^  (\w+)/ ", text, flags=re.M))
    assert rooms == {path.parent.name for path in (ROOT / "lit_compress").glob("*/__init__.py")}


FAMILIES = ("second_order", "low_rank", "low_rank_and_rows", "structured", "hidden_states", "single_weights")


def test_every_method_has_a_section():
    sections = []
    for name in FAMILIES:
        text = named(name).read_text(encoding="utf-8")
        sections += text.split("\n## ")[1:] or [text]
    for name in set(methods.__all__) - {"Method"}:
        assert any(f"`{name}`" in section or section.startswith(f"{name}\n") for section in sections), name
    for section in sections:
        for part in ("```text", "python -m lit_compress fit", "Reached here", "Not for"):
            assert part in section, f"{section.partition(chr(10))[0]}: no '{part}'"


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
    text = named("recipes").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| recipe \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, flags=re.M)
    shown = {}
    for line in table.splitlines():
        names, tasks = (set(re.findall(r"\w+", cell)) for cell in line.strip("|").split("|"))
        shown |= dict.fromkeys(names, tasks)
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")}
    assert shown == {name: set(recipe["tasks"]) for name, recipe in recipes.items() if "tasks" in recipe}


def test_errors_of_the_troubleshooting_page_are_those_of_the_code():
    text = named("troubleshooting").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.+?)` \|", text[text.index("| the line contains") :], flags=re.M)
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lit_compress").rglob("*.py"))
    assert quoted and not [part for part in quoted if part not in re.sub(r'"\s*\n\s*f?"', "", code)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["commands", "methods"])
def test_the_lists_of_options_are_those_of_the_parsers(name):
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert hooks.written(name) == page and "<!--end-->" in page, "stale: python docs/site_hooks.py"
