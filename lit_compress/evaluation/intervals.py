"""How sure a score is: intervals that hold the score of all texts like these in 95 of 100 samples of this size.

Fractions of rows have Wilson's interval (1927, https://doi.org/10.1080/01621459.1927.10502953). Other scores are drawn
again: as many rows with replacement, 1000 times, the middle 95 % of the scores (Efron 1979, the bootstrap).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

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


def _draws(rows: int) -> int:
    return max(100, min(DRAWS, MOST_VALUES // rows))


def _middle(scores: Tensor) -> Interval:
    """Return the bounds of the middle 95 % of ``scores``."""
    low, high = torch.quantile(scores.double(), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def bootstrap(scores: Callable[[Tensor], Mapping[str, Tensor]], rows: int) -> dict[str, Interval]:
    """Return the intervals of ``scores(numbers of rows)`` by name."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = [scores(torch.randint(rows, (rows,), generator=generator)) for _ in range(_draws(rows))]
    return {name: _middle(torch.stack([some[name] for some in drawn]).float()) for name in drawn[0]}


def bootstrap_table(
    scores: Callable[[Tensor], Mapping[str, Tensor]], table: Tensor, names: Collection[str]
) -> dict[str, Interval]:
    """Return the intervals of the scores ``names`` [...] of tables [..., true class, predicted class]."""
    if not names:
        return {}
    counts = table.double().flatten()
    rows = int(counts.sum())
    generator = torch.Generator().manual_seed(SEED)
    drawn = [torch.multinomial(counts, rows, replacement=True, generator=generator) for _ in range(_draws(rows))]
    tables = torch.stack([torch.bincount(cells, minlength=len(counts)) for cells in drawn])
    found = scores(tables.double().view(-1, *table.shape))
    return {name: _middle(found[name]) for name in names}


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


def near_constant(name: str, metric: float, constant: float, constant_error: float = 0.0) -> str:
    """Return in words that the dev metric ``name`` is within two standard errors of a constant answer's; else ""."""
    if metric <= constant:
        return f"dev {name} {metric:.4f}, the best constant answer has {constant:.4f}"
    if metric > constant + 2 * constant_error:
        return ""
    return (
        f"dev {name} {metric:.4f} is within two standard errors, 2 x {constant_error:.4f}, of the best constant "
        f"answer's {constant:.4f}"
    )


def near_chance(report: dict[str, Any], model: str = "dense") -> str:
    """Return :func:`near_constant` of the metric of a model (``dense`` or ``compressed``) in a report."""
    if (constant := report.get("constant")) is None:
        return ""
    return near_constant(report["metric"]["name"], report[model]["metric"], constant, report.get("constant_error", 0.0))
