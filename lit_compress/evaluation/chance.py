"""How probable a difference is by chance: Student's t, the sign test, Holm's correction, a constant answer's score."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, comb, cos, floor, pi, sin, sqrt
from typing import Any, NamedTuple


def student(t: float, freedom: float) -> float:
    """Return the probability that Student's t is farther from 0 than ``t``; ``freedom`` is rounded down.

    >>> [round(student(t, n), 3) for t, n in ((12.706, 1), (4.303, 2), (2.228, 10))]
    [0.05, 0.05, 0.05]
    """
    degrees = max(1, floor(freedom + 1e-9))  # Abramowitz and Stegun 26.7.3 and 26.7.4
    angle = atan(abs(t) / sqrt(degrees))
    odd = degrees % 2
    term, total = (cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= k / (k + 1) * cos(angle) ** 2
    inside = sin(angle) * total
    if odd:
        inside = 2 / pi * (angle + inside)
    return max(0.0, 1.0 - inside)


def sign_test(wrong: int, right: int) -> float:
    """Return how probable changes as uneven as these are, if none of the models is better (McNemar's test, exact).

    >>> sign_test(9, 1) < 0.03 < sign_test(6, 4)
    True
    """
    total, least = wrong + right, min(wrong, right)
    return min(1.0, 2 * sum(comb(total, k) for k in range(least + 1)) / 2**total)


def holm(chances: Sequence[float]) -> list[float]:
    """Return the probabilities of several tests corrected for their number, each at most 1.

    At most 5 % of such families have a corrected value below 0.05 by chance, however they depend on each other (Holm
    1979, https://www.jstor.org/stable/4615733).

    >>> [round(p, 2) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(chances), 0.0
    for done, place in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        largest = max(largest, min(1.0, (len(chances) - done) * chances[place]))
        corrected[place] = largest
    return corrected


class Constant(NamedTuple):
    """The first dev metric of the best constant answer, e.g. the accuracy of the majority class.

    Attributes:
        score: 0 for correlations, and if constant answers make no sense (the type of task has no ``constants``).
        error: the standard error of a model that knows no more, on so many rows.
    """

    score: float
    error: float = 0.0

    def near(self, name: str, metric: float) -> str:
        """Return in words that the dev metric ``name`` is within two standard errors of this; "" if it is better."""
        if metric <= self.score:
            return f"dev {name} {metric:.4f}, the best constant answer has {self.score:.4f}"
        if metric > self.score + 2 * self.error:
            return ""
        return (
            f"dev {name} {metric:.4f} is within two standard errors, 2 x {self.error:.4f}, of the best constant "
            f"answer's {self.score:.4f}"
        )


def near_chance(report: dict[str, Any]) -> str:
    """Return in words that the dense model's metric is near a constant answer's; "" if it is better, or not known."""
    if (constant := report.get("constant")) is None:
        return ""
    answer = Constant(constant, report.get("constant_error", 0.0))
    return answer.near(report["metric"]["name"], report["dense"]["metric"])
