"""What stands on README.md and the pages of docs/: commands, their output, Python."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Item:
    """A command or a block of Python."""

    where: str  # page and line
    language: str  # ``bash`` or ``python``
    text: str  # the command in one line, or the code
    output: tuple[str, ...] = ()  # lines that the page shows below the command


def named(name: str) -> Path:
    """Return a page of docs/ by its name."""
    (found,) = (page for page in PAGES[1:] if page.stem == name)
    return found


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return (first line, language, text) of every fenced block; text outside has the language ``prose``."""
    found, language, start = [], "prose", 1
    lines: list[str] = []
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), "```end"], start=1):
        if line.startswith("```"):
            found.append((start, language, "\n".join(lines)))
            language, start, lines = (line[3:].strip() if language == "prose" else "prose"), number + 1, []
        else:
            lines.append(line)
    assert language in ("prose", "end"), f"{page}: a block is not closed"
    return found


def items(page: Path) -> list[Item]:
    """Return the commands and the Python blocks of a page, in order."""
    found: list[Item] = []
    for start, language, text in blocks(page):
        if language == "python":
            found.append(Item(f"{page.name}:{start}", language, text))
            continue
        lines = re.sub(r" *\\\n *", " ", text).split("\n")
        if language == "bash":
            commands: list[tuple[str, tuple[str, ...]]] = [
                (line, ()) for line in lines if line and not line.startswith("#")
            ]
        elif language == "console":
            parts = [part.split("\n") for part in re.split(r"^\$ ", "\n".join(lines), flags=re.M)[1:]]
            commands = [(part[0], tuple(line for line in part[1:] if line.strip())) for part in parts]
        elif language in ("prose", "text", ""):
            pattern = r"\s*\$ (.*)|\s*(python -m lit_compress .*)| {4,}(lit_compress .*)"
            commands = [(next(filter(None, m.groups())), ()) for line in lines if (m := re.fullmatch(pattern, line))]
        else:
            commands = []
        found += [Item(f"{page.name}:{start}", "bash", *command) for command in commands]
    return found


def lit_compress_words(text: str) -> list[str] | None:
    """Return the arguments of a lit_compress command, also of one that torchrun starts; None if it is none."""
    words = shlex.split(text)
    if words[0] == "torchrun":
        return words[words.index("lit_compress") + 1 :]
    if words[:3] == ["python", "-m", "lit_compress"]:
        return words[3:]
    return words[1:] if words[0] == "lit_compress" else None


def python_blocks(name: str) -> list[str]:
    """Return the blocks of Python of a page of docs/."""
    return [text for _, language, text in blocks(named(name)) if language == "python"]


def skeleton(line: str, folders: tuple[str, ...] = ()) -> str:
    """Return a line of output without numbers, borders and the folders of this machine."""
    for folder in folders:
        line = line.replace(f"{folder}/", "")
    line = re.sub(r"[\u2500-\u257f]", " ", line).replace(" noise ", " 1.0x ").replace("≈", "")  # on a busy machine
    line = line.replace(" (chance)", "")  # of a teacher that these short runs teach hardly anything
    return " ".join(re.sub(r"\d[\d,.]*(?:e[+-]\d+)?", "#", line).split())
