"""The pages are in plain English: three habits are counted; `python tests/docs/test_english.py` prints the counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks

TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "benchmarks").glob("*/findings.md"))]
UNMENDED: tuple[str, ...] = (
    "benchmarks/architectures/findings.md",
    "benchmarks/cofi/findings.md",
    "benchmarks/fwsvd/findings.md",
    "benchmarks/lpaf_vs_svd/findings.md",
    "benchmarks/pruning/findings.md",
    "benchmarks/second_order/findings.md",
    "benchmarks/sp3/findings.md",
    "benchmarks/speed/findings.md",
)  # pages that are not yet rewritten; the list only becomes shorter


@dataclass(frozen=True)
class Habits:
    """How often a text has each habit.

    Attributes:
        words: of the prose, without code.
        what: clauses with "what", such as "what comes back"; questions do not count.
        that_of: "that of" and "those of".
        sentences: their number.
        long: sentences of more than 30 words.
    """

    words: int
    what: int
    that_of: int
    sentences: int
    long: int

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


def habits(path: Path) -> Habits:
    """Return the counts of a page."""
    sentences = sentences_of("\n\n".join(text for _, language, text in blocks(path) if language == "prose"))
    told = " ".join(sentence for sentence in sentences if not sentence.endswith("?"))
    return Habits(
        words=sum(len(sentence.split()) for sentence in sentences),
        what=len(re.findall(r"\bwhat\b", told, flags=re.I)),
        that_of=len(re.findall(r"\b(?:that|those) of\b", told, flags=re.I)),
        sentences=len(sentences),
        long=sum(len(sentence.split()) > 30 for sentence in sentences),
    )


def name(path: Path) -> str:
    """Return a page's path in the repository."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in TEXTS if name(path) not in UNMENDED], ids=name)
def test_a_page_is_in_plain_english(path: Path) -> None:
    assert not habits(path).excess()


def test_only_pages_that_need_it_are_left_out() -> None:
    assert not [path for path in TEXTS if name(path) in UNMENDED and not habits(path).excess()]
    assert set(UNMENDED) <= set(map(name, TEXTS))


if __name__ == "__main__":
    for page in TEXTS:
        print(f"{name(page):50} {habits(page)} {'; '.join(habits(page).excess())}")
