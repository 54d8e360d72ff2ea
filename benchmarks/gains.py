"""Speed-ups over the dense model, which models of equal shapes share: for the tables of the studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lit_compress.run.results import costs_in, mean_costs


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
        return f"{self.times:.2f}x" if self.steady else f"≈{self.times:.1f}x"


def shared_gains(reports: Sequence[dict[str, Any]]) -> list[Gain | None]:
    """Return the speed-up of every report's model: the median over all models with its shapes, steady ones if any.

    Shapes count as equal if all numbers of parameters and the FLOPs are, on one task and processor. None for a model
    that was not timed in turns with its dense one. Reports of earlier versions have no verdict; they count as steady.
    """
    by_shapes, keys = dict[Any, list[Gain]](), list[Any]()
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
    middle = {}
    for key, gains in by_shapes.items():
        named = [gain.times for gain in gains if gain.steady]
        middle[key] = Gain(median(named or [gain.times for gain in gains]), bool(named))
    return [None if key is None else middle[key] for key in keys]


def with_gains(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results, each with its speed-up as ``gain``, which models of equal shapes share; None: not timed."""
    return [result | {"gain": gain} for result, gain in zip(results, shared_gains(results), strict=True)]


def middle(found: list[Gain | None]) -> str:
    """Return the median of some speed-ups for a table; nothing if a model was not timed."""
    known = [gain for gain in found if gain is not None]
    if len(known) < len(found):
        return ""
    return str(Gain(median(gain.times for gain in known), all(gain.steady for gain in known)))


def costs_of(reports: Sequence[dict[str, Any]]) -> tuple[list[dict[str, float | None]], dict[str, float | None]]:
    """Return every cost of the model of each report, and the mean costs of their dense models.

    A machine is not as fast at all times, but each report timed its model and its dense model in turns. So a model's
    latency is the mean of all dense models' over its speed-up, which models of equal shapes share.
    """
    dense = mean_costs([costs_in(report["dense"]) for report in reports])
    by_net = [costs_in(report["compressed"]) for report in reports]
    for costs, gain in zip(by_net, shared_gains(reports), strict=True):
        if gain and dense["latency"]:
            costs["latency"] = dense["latency"] / gain.times
    return by_net, dense
