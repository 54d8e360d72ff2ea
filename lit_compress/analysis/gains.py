"""Speed-ups of several runs: runs of equal shapes have one, and only steady times give one with two decimals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

UNSTEADY = "≈: the timing was too noisy for a second decimal, or within the noise of 1."


@dataclass(frozen=True)
class Gain:
    """How many times faster than the dense model.

    Attributes:
        times: dense time / own time.
        steady: False if the runs' own verdict is that their times carry no such number.
    """

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
    found: dict[Any, list[Gain]] = {}
    keys = [_shapes(report, place) for place, report in enumerate(reports)]
    for key, report in zip(keys, reports, strict=True):
        if (times := report["ratios"].get("speedup")) is not None:
            timing = report.get("timing") or {}
            verdict = (timing.get("speedup") or {}).get("verdict", "faster")
            steady = verdict in ("faster", "slower") and timing.get("steady", True)
            found.setdefault(key, []).append(Gain(times, steady))
    shared = {key: _middle(gains) for key, gains in found.items()}
    return [
        None if report["ratios"].get("speedup") is None else shared[key]
        for key, report in zip(keys, reports, strict=True)
    ]


def _middle(gains: list[Gain]) -> Gain:
    named = [gain.times for gain in gains if gain.steady]
    return Gain(median(named)) if named else Gain(median(gain.times for gain in gains), steady=False)


def mean_gain(gains: Sequence[Gain | None]) -> Gain | None:
    """Return the mean of the known speed-ups, steady if all of them are; None if none is known."""
    known = [gain for gain in gains if gain is not None]
    return Gain(mean(gain.times for gain in known), all(gain.steady for gain in known)) if known else None


def _shapes(report: dict[str, Any], place: int) -> Any:
    compressed = report["compressed"]
    if "params" not in compressed or "flops" not in compressed:
        return place
    params = tuple(sorted(compressed["params"].items()))
    return report.get("task"), (report.get("hardware") or {}).get("cpu"), params, compressed["flops"]
