"""Write the numbers and tables of a Markdown page from stored results.

numbers.yaml lists the measured numbers of each page with their sources, in the order of the page. ``python -m
benchmarks.tables`` writes a number again, with as many decimals as it has, in the page and in the list::

    docs/how_to/smaller_file.md:
    - "84.5": "fwsvd/retrain-sst2-none-in-*"
    - "4.6": "max sp3/*-pca-0.06-*:ratios:speedup"
    - "1.2": "error size/trained-int8-8"

The first part of a source names files below the study's ``results/``, without ``.json``. Several files give their mean,
or their ``min`` or ``max``. The keys of the JSON follow after colons; without them they are ``compressed:metric%``. In
a list a key is a position, the values of the rows to take (``rows:weighting=none,rank_ratio=0.3:metric%``) or ``*``. A
percent sign at the end multiplies by 100, ``MB`` divides by a million. ``error`` gives the standard error in points of
the model at the keys, from its 95 % interval. A number from a paper has the source ``paper``.

A table is between ``<!--study.function-->`` and ``<!--end-->``. The function is one of the study's tables.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from statistics import mean
from typing import Any

import yaml

from benchmarks.common import HERE

NUMBERS = HERE / "numbers.yaml"
TABLE = re.compile(r"(<!--(\w+)\.(\w+)-->\n).*?(<!--end-->)", flags=re.S)
OF_SEVERAL: dict[str, Callable[[list[float]], float]] = {"": mean, "min": min, "max": max}
HEAD = "# The measured numbers of the pages with their sources, in the order of each page (benchmarks/marks.py).\n"
Numbers = list[tuple[str, str]]  # a number as it is printed, and its source


def numbers() -> dict[str, Numbers]:
    """Return the measured numbers of every page, by its path below the root."""
    listed = yaml.safe_load(NUMBERS.read_text(encoding="utf-8"))
    return {page: [pair for entry in entries for pair in entry.items()] for page, entries in listed.items()}


def as_yaml(listed: dict[str, Numbers]) -> str:
    """Return the text of numbers.yaml."""
    pages = ("".join([f"{page}:\n", *(f'- "{n}": "{source}"\n' for n, source in listed[page])]) for page in listed)
    return HEAD + "".join(pages)


def with_tables(page: str) -> str:
    """Return a page with its tables written again."""

    def table(found: re.Match[str]) -> str:
        made = getattr(import_module(f"benchmarks.{found[2]}.tables"), found[3])()
        return f"{found[1]}\n{made.rstrip()}\n\n{found[4]}"

    return TABLE.sub(table, page)


def filled(page: str, listed: Numbers) -> tuple[str, Numbers]:
    """Return a page and its list with the numbers written again.

    Raises:
        ValueError: the page has a number not, or not in this place of the order; a source leads to no number.
    """
    parts: list[str] = []
    again: Numbers = []
    position = 0
    for number, source in listed:
        found = re.compile(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)").search(page, position)
        if not found:
            raise ValueError(f"{number} ({source}) is not behind {again[-1][0] if again else 'the start'} on the page")
        decimals = len(number.partition(".")[2])
        new = number if source == "paper" else f"{measured(source):,.{decimals}f}"
        parts += [page[position : found.start()], new]
        again.append((new, source))
        position = found.end()
    return "".join(parts) + page[position:], again


def measured(name: str) -> float:
    """Return the number with this name.

    Raises:
        ValueError: no result has this name, or the keys lead to no number.

    >>> round(measured("comparison/sst2_4000/sp3-density=0.1-*:compressed:density"), 2)
    0.1
    """
    scale = 100 if name.endswith("%") or ":" not in name else 1e-6 if name.endswith("MB") else 1
    files, *keys = name.removesuffix("%").removesuffix(" MB").split(":")
    reduction, _, files = files.rpartition(" ")
    study, _, pattern = files.partition("/")
    paths = sorted((HERE / study / "results").glob(f"{pattern}.json"))
    try:
        results = [json.loads(path.read_text()) for path in paths]
        if reduction == "error":
            low, high = (value_at(results[0], [*(keys or ["compressed"]), "interval", end]) for end in ("0", "1"))
            return 100 * (high - low) / (2 * 1.96)
        return OF_SEVERAL[reduction]([value_at(result, keys or ["compressed", "metric"]) for result in results]) * scale
    except (LookupError, ValueError, TypeError) as error:
        raise ValueError(f"{name}: {len(paths)} results, {error!r}") from error


def value_at(value: Any, keys: list[str]) -> float:
    """Return the number below nested keys.

    >>> value_at({"rows": [{"ratio": 0.1, "metric": 3}, {"ratio": 0.2, "metric": 4}]}, ["rows", "ratio=0.2", "metric"])
    4.0
    """
    if not keys:
        return float(value)
    key, *rest = keys
    if isinstance(value, dict):
        return value_at(value[key], rest)
    wanted = dict(pair.split("=") for pair in key.split(",")) if "=" in key else {}
    rows = [row for row in value if all(str(row[name]) == text for name, text in wanted.items())]
    return mean(value_at(row, rest) for row in (rows if wanted or key == "*" else [value[int(key)]]))
