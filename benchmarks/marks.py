"""Write the numbers and tables of a Markdown page from stored results.

A comment behind a number names its source, and ``python -m benchmarks.tables`` writes the number again, with as many
decimals as it has::

    84.5<!--fwsvd/retrain-sst2-none-in-*-->
    4.6<!--max sp3/*-pca-0.06-*:ratios:speedup-->
    1.2<!--error size/trained-int8-8-->

The first part names files below the study's ``results/``, without ``.json``. Several files give their mean, or their
``min`` or ``max``. The keys of the JSON follow after colons; without them they are ``compressed:metric%``. In a list a
key is a position, the values of the rows to take (``rows:weighting=none,rank_ratio=0.3:metric%``) or ``*``. A percent
sign at the end multiplies by 100, ``MB`` divides by a million. ``error`` gives the standard error in points of the
model at the keys, from its 95 % interval. A number from a paper has ``<!--paper-->`` behind it.

A table is between ``<!--study.function-->`` and ``<!--end-->``. The function is one of the study's tables.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from statistics import mean
from typing import Any

from benchmarks.common import HERE

NUMBER = re.compile(r"(\d[\d,]*(?:\.(\d+))?)<!--([^<>]*/[^<>]*)-->")
TABLE = re.compile(r"(<!--(\w+)\.(\w+)-->\n).*?(<!--end-->)", flags=re.S)
OF_SEVERAL: dict[str, Callable[[list[float]], float]] = {"": mean, "min": min, "max": max}


def filled(page: str) -> str:
    """Return a page with its numbers and tables written again.

    Raises:
        ValueError: a name leads to no result, or to no number in it.
    """

    def number(found: re.Match[str]) -> str:
        return f"{measured(found[3]):,.{len(found[2] or '')}f}<!--{found[3]}-->"

    def table(found: re.Match[str]) -> str:
        made = getattr(import_module(f"benchmarks.{found[2]}.tables"), found[3])()
        return f"{found[1]}\n{made.rstrip()}\n\n{found[4]}"

    return NUMBER.sub(number, TABLE.sub(table, page))


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
        raise ValueError(f"<!--{name}-->: {len(paths)} results, {error!r}") from error


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
