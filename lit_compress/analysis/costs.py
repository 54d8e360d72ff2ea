"""Costs and speed-ups of models from their reports, and Pareto fronts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from lit_compress.export.table import rough

# name of the cost -> where it is in a model's entry of the report
COSTS = {
    "parameters": ("params", "non_embedding"), "flops": ("flops",), "bytes": ("bytes",),
    "latency": ("latency_ms", "median"),
}  # fmt: skip


@dataclass(frozen=True)
class Gain:
    """How many ``times`` faster than the dense model; not ``steady`` if its runs say that their times are too noisy."""

    times: float
    steady: bool = True

    def __str__(self) -> str:
        """Return the text for tables.

        >>> print(Gain(2.153), Gain(2.153, steady=False))
        2.15x ≈2.2x
        """
        return f"{self.times:.2f}x" if self.steady else rough(self.times)


def shared_gains(reports: Sequence[dict[str, Any]]) -> list[Gain | None]:
    """Return the speed-up of every report's model: the median over all models with its shapes, steady ones if any.

    Shapes count as equal if all numbers of parameters and the FLOPs are, on one task and processor. None for a model
    that was not timed in turns with its dense one. Reports of earlier versions have no verdict; they count as steady.
    """
    by_shapes: dict[Any, list[Gain]] = {}
    keys = []
    for place, report in enumerate(reports):
        compressed, timing = report["compressed"], report.get("timing") or {}
        key: Any = place
        if "params" in compressed and "flops" in compressed:
            processor, params = (report.get("hardware") or {}).get("cpu"), tuple(sorted(compressed["params"].items()))
            key = report.get("task"), processor, params, compressed["flops"]
        if (times := report["ratios"].get("speedup")) is not None:
            verdict = (timing.get("speedup") or {}).get("verdict", "faster")
            steady = verdict in ("faster", "slower") and timing.get("steady", True)
            by_shapes.setdefault(key, []).append(Gain(times, steady))
        keys.append(None if times is None else key)
    return [None if key is None else _middle(by_shapes[key]) for key in keys]


def _middle(gains: list[Gain]) -> Gain:
    named = [gain.times for gain in gains if gain.steady]
    return Gain(median(named or [gain.times for gain in gains]), bool(named))


def mean_gain(gains: Sequence[Gain | None]) -> Gain | None:
    """Return the mean of the known speed-ups, steady if all of them are; None if none is known."""
    known = [gain for gain in gains if gain is not None]
    return Gain(mean(gain.times for gain in known), all(gain.steady for gain in known)) if known else None


def cost_of(entry: dict[str, Any], cost: str) -> float | None:
    """Return a cost of a model from its entry in the report; None if it is not there."""
    value: Any = entry
    for key in COSTS[cost]:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def costs_of(reports: Sequence[dict[str, Any]]) -> tuple[list[dict[str, float | None]], dict[str, float | None]]:
    """Return every cost of the model of each report, and the mean costs of their dense models.

    A machine is not as fast at all times, but each report timed its model and its dense model in turns. So a model's
    latency is the mean of all dense models' over its speed-up, which models of equal shapes share.
    """
    dense = mean_costs([{cost: cost_of(report["dense"], cost) for cost in COSTS} for report in reports])
    costs_by_net = []
    for report, gain in zip(reports, shared_gains(reports), strict=True):
        costs = {cost: cost_of(report["compressed"], cost) for cost in COSTS}
        if gain and dense["latency"]:
            costs["latency"] = dense["latency"] / gain.times
        costs_by_net.append(costs)
    return costs_by_net, dense


def mean_costs(entries: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of every cost over the models of which it is known; None if it is of none."""
    known = {cost: [entry[cost] for entry in entries if entry[cost] is not None] for cost in COSTS}
    return {cost: mean(values) if values else None for cost, values in known.items()}  # type: ignore[type-var]


def front(points: Sequence[tuple[float, float]], mode: str = "max") -> list[tuple[float, float]]:
    """Return the points (cost, metric) that no other is better than in both, cheapest first.

    >>> front([(1, 0.5), (2, 0.4), (3, 0.9), (3, 0.8)])
    [(1, 0.5), (3, 0.9)]
    """
    sign, kept = (1 if mode == "max" else -1), list[tuple[float, float]]()
    for x, y in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not kept or sign * y > sign * kept[-1][1]:
            kept.append((x, y))
    return kept
