"""Pages, docstrings and messages are in plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks

TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "benchmarks").glob("*/findings*.md"))]
ROOMS = sorted(path for path in (ROOT / "lit_compress").iterdir() if (path / "__init__.py").is_file())
# exports hold a copy of these layers, by which later versions know them; the other holds code as text
COPIED = ("lit_compress/layers/deployed/", "lit_compress/export/check.py")
# in place of: model, next to or compared with, again, except, is before, also
PRIVATE = re.compile(
    r"\b(?:nets?|beside|anew|but for|stands? (?:before|after|behind))\b|, too(?! (?:few|many))\b", flags=re.I
)


@dataclass(frozen=True)
class Habits:
    """How often a text has each habit."""

    words: int  # of the prose, without code
    what: int  # clauses with "what", such as "what comes back"; questions do not count
    that_of: int  # "that of" and "those of"
    sentences: int
    long: int  # sentences of more than 30 words

    def excess(self) -> list[str]:
        """Return a line per habit above its limit; one of each is always allowed."""
        limits = {"what": self.words / 1000, "that_of": 0.3 * self.words / 1000, "long": 0.05 * self.sentences}
        return [f"{name}: {getattr(self, name)} of at most {max(1, most):.0f}" for name, most in limits.items()
                if getattr(self, name) > max(1, most)]  # fmt: skip


def sentences_of(text: str) -> list[str]:
    """Return the sentences of Markdown without code, in paragraphs, lists and tables; two words are no sentence.

    >>> sentences_of("# Title\\n\\nOne is `a b`, yes. Two\\nis [not here](x.md).\\n\\n- Three. Four is more\\n")
    ['One is code, yes.', 'Two is not here.', 'Four is more']
    """
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"`[^`]+`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    text = re.sub(r"^(#.*|\|[-:| ]+\||:::.*)$", "", text, flags=re.M)
    text = re.sub(r"^\s*(- |\d+\. )", "\n\n", text, flags=re.M).replace("|", "\n\n")
    text = re.sub(r"(\be\.g|\bi\.e|\bet al|\bvs)\.", r"\1", text)
    parts = [part for piece in re.split(r"\n\s*\n", text) for part in re.split(r"(?<=[.!?])[)*]*\s+", piece.strip())]
    return [" ".join(part.split()) for part in parts if len(part.split()) > 2]


def counted(sentences: list[str]) -> Habits:
    """Return the counts of sentences."""
    told = " ".join(sentence for sentence in sentences if not sentence.endswith("?"))
    return Habits(
        words=sum(len(sentence.split()) for sentence in sentences),
        what=len(re.findall(r"\bwhat\b", told, flags=re.I)),
        that_of=len(re.findall(r"\b(?:that|those) of\b", told, flags=re.I)),
        sentences=len(sentences),
        long=sum(len(sentence.split()) > 30 for sentence in sentences),
    )


def name(path: Path) -> str:
    """Return a path in the repository."""
    return str(path.relative_to(ROOT))


def docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module and of everything public in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
        yield node.body[0].value  # type: ignore[attr-defined, misc]
    for child in ast.iter_child_nodes(node):
        if not str(getattr(child, "name", "")).startswith("_"):
            yield from docstrings(child)


def messages(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts of at least four words that are no docstrings; of an f-string its fixed parts, as one text."""
    seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            seen |= {id(part) for part in node.values}
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            text = node.value
        if len(text.split()) > 3:
            yield ast.Constant(text, lineno=node.lineno)  # type: ignore[attr-defined]


def plain(text: str) -> str:
    """Return a text without code, arguments' names and examples.

    >>> plain("The ``net``.\\n\\n    net: of `a net`.\\n    >>> 1 beside 2").split()
    ['The', 'code.', 'of', 'code.']
    """
    text = re.sub(r"^\s*>>> .*$|^\s*[*\w, ]+:(?= )", "", text, flags=re.M)
    return re.sub(r"``[^`]*``|`[^`]*`|\S*/\S*", "code", text)


def code_habits(room: Path) -> tuple[Habits, list[str]]:
    """Return the counts of a folder of the package, and the lines with a private word."""
    found, texts = [], []
    for path in sorted(room.rglob("*.py")):
        if not name(path).startswith(COPIED):
            tree = ast.parse(path.read_text())
            for node in (*docstrings(tree), *messages(tree)):
                texts.append(plain(str(node.value)))
                found += [f"{name(path)}:{node.lineno}: {word}" for word in PRIVATE.findall(texts[-1])]
    sentences = [sentence for text in texts for sentence in sentences_of(text)]
    return counted(sentences), found


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_a_page_is_in_plain_english(path: Path) -> None:
    prose = "\n\n".join(text for _, language, text in blocks(path) if language == "prose")
    assert not counted(sentences_of(prose)).excess()
    assert not PRIVATE.findall(plain(re.sub(r"\]\(\S+\)", "]", prose)))


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_docstrings_and_messages_are_in_plain_english(room: Path) -> None:
    found, private = code_habits(room)
    assert not private
    assert not found.excess()
