"""The bases of metrics, and how sure their scores are.

An interval holds the score of all texts like these in 95 of 100 samples of this size. Fractions of rows have Wilson's
(1927, https://doi.org/10.1080/01621459.1927.10502953). Other scores are drawn again: as many rows with replacement,
1000 times, the middle 95 % of the scores (Efron 1979, the bootstrap).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

DRAWS = 1000
MOST_VALUES = 2 * 10**7  # of all draws; more rows are drawn less often
SEED = 0
Z = 1.959963984540054  # of the normal distribution, 95 % are within
FRACTIONS = ("accuracy", "exact_match", "subset_accuracy")  # metrics that count rows

Interval = tuple[float, float]


def wilson(fraction: float, rows: int) -> Interval:
    """Return Wilson's interval of a ``fraction`` of ``rows``."""
    middle = (fraction + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z * (fraction * (1 - fraction) / rows + Z**2 / (4 * rows**2)) ** 0.5 / (1 + Z**2 / rows)
    return max(0.0, middle - half), min(1.0, middle + half)


def standard_error(interval: Interval) -> float:
    """Return half the width of an interval in units of the normal distribution: how far a score usually is off.

    >>> round(standard_error(wilson(0.8165, 872)), 4)
    0.0131
    """
    low, high = interval
    return (high - low) / (2 * Z)


def bootstrap(scores: Callable[[Tensor], Mapping[str, Tensor]], rows: int) -> dict[str, Interval]:
    """Return the intervals of ``scores(numbers of rows)`` by name."""
    generator, draws = torch.Generator().manual_seed(SEED), max(100, min(DRAWS, MOST_VALUES // rows))
    drawn = [scores(torch.randint(rows, (rows,), generator=generator)) for _ in range(draws)]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    bounds = {name: torch.stack([some[name] for some in drawn]).double().quantile(ends) for name in drawn[0]}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def intervals(metrics: MetricCollection, values: Mapping[str, float], rows: int) -> dict[str, Interval]:
    """Return the intervals of the scores ``values`` that have one, by name.

    F1 of answers and of entities, accuracy of words and perplexity have none: these do not count rows. The metrics have
    seen all ``rows``.
    """
    if not rows:
        return {}
    bounds = {name: wilson(value, rows) for name, value in values.items() if name in FRACTIONS}
    for metric in metrics.values():
        bounds = metric.intervals(values.keys() - bounds.keys()) | bounds  # type: ignore[operator]
    return {name: bounds[name] for name in values if name in bounds}


class KeptRows(Metric):
    """A metric whose annotated attributes, each a ``list[Tensor]``, are its states: one tensor per batch."""

    full_state_update = False
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        for name in inspect.get_annotations(type(self)):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def keep(self, *batch: Tensor) -> None:
        """Keep the tensors of a batch, one per state, in the order of the annotations."""
        for name, value in zip(inspect.get_annotations(type(self)), batch, strict=True):
            getattr(self, name).append(value)

    def kept(self) -> list[Tensor]:
        """Return the states of all ranks, [rows, ...] each, on the CPU; [] without rows."""
        states = [getattr(self, name) for name in inspect.get_annotations(type(self))]
        return [dim_zero_cat(state).cpu() for state in states] if len(states[0]) else []

    def intervals(self, names: Collection[str]) -> dict[str, Interval]:
        """Return the drawn intervals of its scores, those called ``names`` at least, if they have one."""
        return {}


class RowScores(KeptRows):
    """Scores of values that every row has, which all have intervals; ``names`` are theirs."""

    names: Sequence[str]

    def values(self) -> list[Tensor]:
        """Return the values [rows, ...] of all ranks, on the CPU; [] without rows."""
        return self.kept()

    def scores(self, *values: Tensor) -> dict[str, Tensor]:
        """Return the scores of some rows by name: the means of values [rows, names], if nothing else is said."""
        return dict(zip(self.names, values[0].double().mean(0), strict=True))

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all rows by name; 0 without rows."""
        values = self.values()
        scores = self.scores(*values) if values else dict.fromkeys(self.names, torch.zeros(()))
        return {name: score.float().to(self.device) for name, score in scores.items()}

    def intervals(self, names: Collection[str]) -> dict[str, Interval]:
        """Return the intervals of all scores, of other rows than these, if one of ``names`` is asked for."""
        values = self.values() if {*names} & {*self.names} else []
        return bootstrap(lambda rows: self.scores(*(some[rows] for some in values)), len(values[0])) if values else {}


def near_chance(report: Mapping[str, Any], model: str = "dense") -> str:
    """Return in words that a model's dev metric is within two standard errors of a constant answer's; else "".

    ``report`` has the metric of ``model``, ``dense`` or ``compressed``, and a constant answer's.
    """
    if (constant := report.get("constant")) is None:
        return ""
    metric, error = report[model]["metric"], report.get("constant_error", 0.0)
    if metric > constant + 2 * error:
        return ""
    sure = f" with a standard error of {error:.4f}" if metric > constant else ""
    return f"dev {report['metric']['name']} {metric:.4f}, the best constant answer has {constant:.4f}{sure}"
