"""Budgets as people say them: a density, a number of parameters, a share of FLOPs, a size of the file, a speed-up.

A budget is a limit. ``density=0.25`` is of the matrices, ``params=5M`` and
``size=20MB`` are of the whole model, embeddings included, ``size`` of its program if the export has one, ``flops=0.3``
is a share of a forward of the dense model, and ``speedup=3x@openvino-int8,32x128`` is dense / compressed time in a
runtime, for batches of texts of so many tokens, on one thread of this machine's CPU, or with ``@cuda`` on its
accelerator. All but the first are turned into a density (run/solve.py), and checked on the export.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args

from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.timing import Speedup

BudgetKind = Literal["density", "params", "flops", "size", "speedup"]
BUDGET_KINDS: tuple[BudgetKind, ...] = get_args(BudgetKind)

_EXAMPLES = {"density": "0.25", "params": "5M", "flops": "0.3", "size": "20MB", "speedup": "3x@openvino-int8,32x128"}
# kind -> the units, their names, the smallest and the largest value, why another is refused
_RANGES: dict[str, tuple[dict[str, int], str, float, float, str]] = {
    "density": ({"": 1}, "none", 1e-300, 1, "is not a share in (0, 1]"),
    "params": ({"": 1, "k": 10**3, "m": 10**6, "b": 10**9}, "k, M, B", 1, inf, "is below 1"),
    "flops": ({"": 1}, "none", 1e-300, 1, "is not a share in (0, 1]"),
    "size": (
        {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
        "kB, MB, GB, KiB, MiB, GiB", 1, inf, "is below 1",
    ),
    "speedup": ({"": 1, "x": 1}, "x", 1, inf, "is below 1, slower than the dense model"),
}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """The limit on an exported model.

    Attributes:
        kind: the unit.
        value: share, number of parameters, bytes, or dense / compressed latency.
        asked: as the user typed it.
        runtime: of a speed-up, or the type of an accelerator; None: the fastest runtime that is installed.
        shapes: of a speed-up: texts in a batch, and their length in tokens; it is reached in all. (): one text and 32
            texts of the task's length.
    """

    kind: BudgetKind
    value: float
    asked: str
    runtime: str | None = None
    shapes: tuple[tuple[int, int], ...] = ()

    def reached(self, report: Mapping[str, Any]) -> float:
        """Return the exported model's value in a report, in the units of ``value``."""
        compressed = report["compressed"]
        if self.kind == "speedup":
            return min(gain["median"] for gain in report["speed"]["shapes"])
        if self.kind == "size":
            return (report.get("program") or compressed)["bytes"]
        if self.kind == "flops":
            return report["ratios"]["flops"]
        return compressed["density"] if self.kind == "density" else compressed["params"]["total"]

    def check(self, report: Mapping[str, Any], density: float) -> dict[str, Any]:
        """Return the field ``budget`` of a report: the asked value, the actual one, and whether it is within the limit.

        ``off`` is actual / asked - 1. ``met`` is None if the timing is too noisy to say whether a speed-up is reached
        at every shape. ``density`` is the one with which the budget was to be met.
        """
        off = (reached := self.reached(report)) / self.value - 1
        met: bool | None = off <= 1e-9
        if self.kind == "speedup":
            gains = [Speedup.of(gain) for gain in report["speed"]["shapes"]]
            verdicts = {gain.reaches(self.value) for gain in gains}
            met = False if False in verdicts else None if None in verdicts else True
        return {
            "asked": self.asked, "kind": self.kind, "value": self.value, "reached": reached, "off": off, "met": met,
            "density": density,
        }  # fmt: skip


def parse_budget(text: str | None, zeros_of: str | None = None) -> Budget | None:
    """Return the budget that a text like ``size=20MB`` says; None for no text.

    ``zeros_of`` names a method that stores removed weights as zeros; then only a density makes sense.

    Raises:
        UserError: the text has no kind, an unknown one, another unit, or a value out of range.

    >>> parse_budget("params=2.5M").value
    2500000.0
    """
    if text is None:
        return None
    asked = str(text)
    kind, equals, value = (part.strip() for part in asked.partition("="))
    if not equals:
        examples = ", ".join(f"{kind}={value}" for kind, value in _EXAMPLES.items())
        raise UserError(f"model.budget: '{asked}' does not say of what; e.g. {examples}")
    if kind not in BUDGET_KINDS:
        raise UserError(f"model.budget: '{asked}' has no known kind; {nearest(kind, BUDGET_KINDS)}")
    value, _, place = (part.strip() for part in value.partition("@"))
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z%]*)", value.lower())
    if not match:
        raise _refusal(asked, kind, "is no number")
    number, unit = float(match[1]), match[2]
    units, names, least, most, why = _RANGES[kind]
    if unit not in units:
        raise _refusal(asked, kind, f"has the unit '{value[len(match[1]) :].strip()}'; valid: {names}")
    number *= units[unit]
    if not least <= number <= most:
        raise _refusal(asked, kind, why)
    if kind == "size" and not unit and number < 1000:
        raise UserError(f"model.budget: '{asked}' has no unit and would be bytes; nearest: size={value}MB")
    if zeros_of and kind != "density":
        why = f"cannot be met by {zeros_of}, which stores the removed weights as zeros"
        raise UserError(f"model.budget: '{asked}' {why}; valid: density=0.25")
    runtime, shapes = _place(asked, kind, place) if "@" in asked else (None, ())
    return Budget(kind, number, asked, runtime=runtime, shapes=shapes)


def _place(asked: str, kind: str, place: str) -> tuple[str | None, tuple[tuple[int, int], ...]]:
    """Return the runtime and the shapes that follow the ``@`` of a speed-up."""
    if kind != "speedup":
        raise UserError(f"model.budget: '{asked}' names where it is measured, which only a speed-up has; leave @ out")
    runtime, shapes = None, []
    for word in (word.strip() for word in place.split(",")):
        if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word):
            shapes.append((int(match[1]), int(match[2])))
        elif re.fullmatch(r"[a-z][a-z0-9-]*", word) and runtime is None:
            runtime = word
        else:
            raise UserError(
                f"model.budget: '{asked}' has '{word}' behind @, neither a runtime nor texts x tokens; e.g. "
                f"{_EXAMPLES['speedup']}"
            )
    return runtime, tuple(dict.fromkeys(shapes))


def _refusal(asked: str, kind: str, why: str) -> UserError:
    return UserError(f"model.budget: '{asked}' {why}; e.g. {kind}={_EXAMPLES[kind]}")


def shown(kind: BudgetKind, value: float) -> str:
    """Return a value of a budget for the screen.

    >>> shown("size", 19_983_212), shown("params", 5e6), shown("speedup", 2.874)
    ('19.98 MB', '5,000,000', '2.87x')
    """
    if kind == "size":
        unit, name = next(((u, n) for u, n in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if value >= u), (1, "B"))
        return f"{value / unit:.4g} {name}"
    if kind == "params":
        return f"{round(value):,}"
    return f"{value:.3g}x" if kind == "speedup" else f"{value:.4g}"


def verdict(met: bool | None) -> str:
    """Return the words for the field ``met`` of :meth:`Budget.check`."""
    return "too noisy to say" if met is None else "met" if met else "missed"


def budget_line(checked: Mapping[str, Any]) -> str:
    """Return the line of the field ``budget`` of a report for the screen."""
    reached, by = shown(checked["kind"], checked["reached"]), f"{abs(checked['off']):.1%}"
    side = "above" if checked["off"] > 0 else "below"
    text = f"budget {checked['asked']}: {verdict(checked['met'])}, the export has {reached}"
    return text if abs(checked["off"]) < 5e-4 else f"{text}, {by} {side} it"
