"""Scores by chance: those of a constant answer."""

from __future__ import annotations

from typing import Any, NamedTuple


class Constant(NamedTuple):
    """The first dev metric of the best constant answer, e.g. the accuracy of the majority class.

    Attributes:
        score: 0 for correlations, and if constant answers make no sense (the type of task has no ``constants``).
        error: the standard error of a model that knows no more, on so many rows.
    """

    score: float
    error: float = 0.0

    @property
    def fields(self) -> dict[str, float]:
        """As a report has it."""
        return {"constant": self.score, "constant_error": self.error}

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


def near_chance(report: dict[str, Any], model: str = "dense") -> str:
    """Return in words that the metric of a model (``dense`` or ``compressed``) is near a constant answer's; else ""."""
    if (constant := report.get("constant")) is None:
        return ""
    answer = Constant(constant, report.get("constant_error", 0.0))
    return answer.near(report["metric"]["name"], report[model]["metric"])
