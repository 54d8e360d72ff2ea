"""Adds to the site of mkdocs.yml the notebook and the pages outside of docs/, and writes the lists of options.

    python docs/site_hooks.py

writes the options from the parsers into the pages that have a mark for them; tests/docs/test_form.py compares them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lit_compress import methods
from lit_compress.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "tutorials/from_python.ipynb"
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/studies.md",
           "benchmarks/*/README.md", "benchmarks/*/figures/*.png")  # fmt: skip
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/ under their paths in the repository, and the notebook as a page."""
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    cells = json.loads((ROOT / "docs" / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    files.append(File.generated(config, "tutorials/notebook.md", content="\n\n".join(map(cell_text, cells))))
    return files


def cell_text(cell: dict[str, Any]) -> str:
    """Return a cell of the notebook as Markdown: its text, or its code and output."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    shown = [f"```python\n{text}\n```"]
    for output in cell["outputs"]:
        if "text" in output:
            shown.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
        else:
            shown.append("".join(output["data"]["text/markdown"]))
    return "\n\n".join(shown)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to pages of the site."""
    here = page.file.src_uri
    source = here if here.startswith(("benchmarks/", *OUTSIDE[:3])) else f"docs/{here}"

    def linked(found: re.Match[str]) -> str:
        image, text, path, anchor = found.groups(default="")
        if not path or ":" in path:
            return found[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        uri = "index.md" if target == "README.md" else target.removeprefix("docs/")
        uri = "tutorials/notebook.md" if uri == NOTEBOOK else uri
        if target != "README.md" and files.get_file_from_path(uri) is None:
            assert (ROOT / target).exists(), f"{source}: no {path}"
            return f"{text} (`{target}`)"  # a file of the repository that is no page
        return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(here) or '.')}{anchor})"

    return LINK.sub(linked, markdown)


def help_of(*words: str) -> str:
    """Return the help of a command as a block of text."""
    said = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    shown = said.getvalue().strip().replace(" \\u0008", "")
    return f"```text\n{shown}\n```"


def commands() -> str:
    """Return the options of every command, with a heading for each."""
    return "\n\n".join(f"## {name}\n\n{help_of(name)}" for name in COMMANDS)


def of_methods() -> str:
    """Return the options under --model of every method, with a heading for each."""
    names = sorted(set(methods.__all__) - {"Method"})
    return "\n\n".join(f"## {name}\n\n{own_part(help_of('fit', '--model', name))}" for name in names)


def own_part(text: str) -> str:
    """Return the groups of a help text that have options of the method."""
    groups = re.split(r"\n\n(?=\S)", text.strip("`").removeprefix("text\n"))
    return "```text\n" + "\n\n".join(group for group in groups if "\n  --model." in group) + "\n```"


GENERATED = {"commands": commands, "methods": of_methods}


def written(name: str) -> str:
    """Return a page of reference/ with its options written again, between its marks."""
    page = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    return re.sub(
        r"(<!--options-->\n).*(<!--end-->)",
        lambda found: f"{found[1]}\n{GENERATED[name]()}\n\n{found[2]}",
        page,
        flags=re.S,
    )


if __name__ == "__main__":
    for name in GENERATED:
        (ROOT / "docs" / "reference" / f"{name}.md").write_text(written(name), encoding="utf-8")
