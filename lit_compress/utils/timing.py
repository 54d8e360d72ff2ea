"""Timing of functions that take turns, and the claims that the spread of their times allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, Literal

import torch

from lit_compress.utils.devices import synchronize

STEADY = 1.5  # p90 / p10 above which a machine was too busy for its times to be trusted
WARM_UP = 5  # first rounds, which fill caches and are not counted


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Work with a fixed number of threads, without gradients: more threads than free cores give noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def in_turns(
    variants: Sequence[Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = WARM_UP,
    seconds: float = float("inf"),
    least: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    device: str = "cpu",
) -> list[list[float]]:
    """Return the milliseconds of every function in every round; a round calls each once.

    Taking turns spreads the drift of a machine over all functions, so that times of one round can be compared.

    Args:
        variants: the functions.
        rounds: that count, after ``warm_up`` others, which fill caches.
        warm_up: see above.
        seconds: after these only the ``least`` rounds begin; warming up has as much time for itself.
        least: see above.
        clock: returns seconds.
        device: where the functions leave work; on CUDA its own events measure it, on others it is waited for.
    """
    times: list[list[float]] = [[] for _ in variants]
    begin = clock()
    for round_ in range(-warm_up, rounds):
        if round_ == 0:
            begin = clock()
        over = clock() - begin > seconds
        if over and round_ >= least:
            break
        if over and -warm_up < round_ < 0:
            continue  # one round is enough to warm up what is that slow
        for variant, record in zip(variants, times, strict=True):
            if device == "cuda":
                taken = _on_cuda(variant)
            else:
                start = clock()
                variant()
                synchronize(torch.device(device))
                taken = 1000 * (clock() - start)
            if round_ >= 0:
                record.append(taken)
    return times


def _on_cuda(variant: Callable[[], object]) -> float:
    """Return the milliseconds from an idle device to the end of its work: the host's launches count, if it waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    variant()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def summary(times: Sequence[float]) -> dict[str, float]:
    """Return median, p10 and p90."""
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else [*times] * 9
    return {"median": median(times), "p10": tenths[0], "p90": tenths[8]}


def spread(times: Sequence[float]) -> float:
    """Return p90 / p10; above :data:`STEADY` the machine was too busy for the times to be trusted."""
    return (ends := summary(times))["p90"] / ends["p10"]


@dataclass(frozen=True)
class Speedup:
    """How many times faster one function is than another.

    Attributes:
        median: over the rounds, of the other's time / its own in the same round.
        low, high: p10 and p90 of the same.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Speedup:
        """Return the speed-up of an :meth:`entry`."""
        return cls(entry["median"], entry["low"], entry["high"])

    def entry(self) -> dict[str, Any]:
        """Return the fields of a report, its verdict among them."""
        return {**asdict(self), "verdict": self.verdict}

    @property
    def verdict(self) -> Literal["faster", "slower", "noise", "unsteady"]:
        """The allowed claim: none if the rounds disagree which is faster, or by how much (:data:`STEADY`)."""
        if self.low <= 1 <= self.high:
            return "noise"
        if self.high > STEADY * self.low:
            return "unsteady"
        return "faster" if self.low > 1 else "slower"

    def reaches(self, times: float) -> bool | None:
        """Return whether the speed-up is ``times`` or more; None if the rounds disagree or their spread is too large.

        >>> Speedup(3.2, 3.1, 3.4).reaches(3), Speedup(2.7, 2.6, 2.8).reaches(3), Speedup(3.2, 2.9, 3.4).reaches(3)
        (True, False, None)
        """
        if self.high < times:
            return False
        return True if self.low >= times and self.high <= STEADY * self.low else None

    @property
    def is_named(self) -> bool:
        """Whether the spread carries the number."""
        return self.verdict in ("faster", "slower")

    def __str__(self) -> str:
        """Return the text for users, with a number if the spread carries it.

        >>> print(Speedup(2.11, 1.94, 2.3), Speedup(1.02, 0.97, 1.1), Speedup(2.0, 1.1, 3.9), sep="; ")
        2.11x (1.94-2.30); within the noise; too noisy
        """
        words = {"noise": "within the noise", "unsteady": "too noisy"}
        return words.get(self.verdict) or f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def speedup(slow: Sequence[float], fast: Sequence[float]) -> Speedup:
    """Compare the times of two functions that took turns, round by round."""
    return Speedup(*summary([before / after for before, after in zip(slow, fast, strict=True)]).values())
