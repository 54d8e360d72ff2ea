"""One colour and one shape per method in every picture: pages, PNG files, the benchmarks' figures."""

from __future__ import annotations

import re
from collections.abc import Iterable

# the page names them --c0 ... --c11, in a light and in a dark theme
LIGHT = (
    "#0a5cad", "#c4500b", "#12805c", "#b0307a", "#8a6d00", "#6b40b5", "#2191b5", "#7a4a3a", "#57606a", "#6a9a1f",
    "#e2718e", "#8fa7e0",
)  # fmt: skip
DARK = (
    "#6db3f8", "#ff9d5c", "#4ccfa4", "#f58ac4", "#e0c04a", "#b79bf5", "#63d3ee", "#d2a08e", "#aab4be", "#a6d65a",
    "#ffb3c1", "#9fb0e8",
)  # fmt: skip
MARKERS = "os^D"
LOOKS = len(LIGHT) * len(MARKERS)
# a method's place is its number
METHODS = (
    "SecondOrder", "CoFi", "LoSparse", "SP3", "ITP", "LPAF", "FWSVD", "SVD", "FLOP", "BlockMovement", "Theseus",
    "LowRankI", "LLMPruner", "SliceGPT", "Movement", "Layers", "CoFiLoSparse", "Magnitude", "FirstOrder", "PLATON",
    "LowRankII",
)  # fmt: skip


def look(number: int) -> tuple[int, int]:
    """Return the numbers of the colour and of the shape; the first 48 numbers have different ones.

    >>> [look(number) for number in (0, 1, 12, 47)]
    [(0, 0), (1, 1), (0, 1), (11, 2)]
    """
    return number % len(LIGHT), (number + number // len(LIGHT)) % len(MARKERS)


def numbers_of(labels: Iterable[str]) -> dict[str, int]:
    """Return the number of every label for :func:`look`, in the order of ``labels``.

    A label that is a method's name has the method's number. Other labels that begin with it share its colour as long as
    there are shapes. The rest get free numbers.

    >>> numbers_of(["SVD, no training", "SVD", "mine", "Low-rank II"])
    {'SVD, no training': 19, 'SVD': 7, 'mine': 21, 'Low-rank II': 20}
    """
    labels = list(dict.fromkeys(labels))
    known = {_letters(name): number for number, name in enumerate(METHODS)}
    numbers = {label: known[_letters(label)] for label in labels if _letters(label) in known}
    for label in labels:
        begins = [name for name in known if _letters(label).startswith(name)]
        base = known[max(begins, key=len)] if begins else None
        same = [] if base is None else [(base + i * len(LIGHT)) % LOOKS for i in range(len(MARKERS))]
        free = [n for n in (*same, *range(len(METHODS), LOOKS), *range(LOOKS)) if n not in numbers.values()]
        numbers.setdefault(label, free[0] if free else len(numbers) % LOOKS)
    return {label: numbers[label] for label in labels}


def variables(colours: Iterable[str]) -> str:
    """Return colours as CSS variables.

    >>> variables(("#000", "#fff"))
    '--c0: #000; --c1: #fff;'
    """
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
