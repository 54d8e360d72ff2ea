"""The report of a run: every number, measured on the models, of the dense, the compressed and all stages' models."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lit_compress.evaluation.evaluate import interval_of
from lit_compress.evaluation.intervals import FRACTIONS, Interval, wilson
from lit_compress.evaluation.metrics import higher_is_better
from lit_compress.models.accounting import dense_site_params, forward_times, measure
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model
from lit_compress.stages.rounded import is_rounded
from lit_compress.tasks.records import Task
from lit_compress.utils.devices import accelerator_name
from lit_compress.utils.progress import track
from lit_compress.utils.timing import STEADY, speedup, spread, summary
from lit_compress.version import __version__

_PACKAGES = ("torch", "lightning", "transformers", "datasets", "torchmetrics")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend."""
    return {"lit_compress": __version__, "python": platform.python_version(), **{p: version(p) for p in _PACKAGES}}


def hardware() -> dict[str, Any]:
    """Return the machine: processor, cores, accelerator."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": accelerator_name(),
    }


@dataclass(frozen=True)
class Measured:
    """A model with its dev metric.

    Attributes:
        net: the model; one without values has no times.
        bytes: of the files of its weights; of a model that was given, in the dtype of these.
        metric: dev metric, and its 95 % ``interval``, if that is known.
        initial: dev metric before the first step of its stage, e.g. right after a factorization; None without training.
    """

    net: Model
    bytes: int
    metric: float
    initial: float | None = None
    interval: Interval | None = None

    @classmethod
    def by(cls, scores: Mapping[str, float], net: Model, size: int, task: Task) -> Measured:
        """Return a model of so many bytes with the first metric of ``scores``, which ``evaluate`` returned."""
        key = f"val/{task.metrics[0]}"
        return cls(net, size, scores[key], interval=interval_of(scores, key))

    def entry(self, task: Task, whole: int, rows: int) -> dict[str, Any]:
        """Return the model's numbers for the report, without latency; FLOPs are at :func:`reading_length`.

        ``whole`` is the number of weights of the dense model's sites; an ordinary export has a smaller configuration.
        The metric is of ``rows`` rows: a fraction of them has its interval from it, known or not.
        """
        numbers = measure(self.net, reading_length(self.net, task))
        stored = numbers["params"]["sites"] / whole
        # zeros of rounded weights were not removed
        by_shape = self.net.device.type == "meta" or is_rounded(self.net, partly=True)
        numbers["density"] = stored if by_shape else numbers["density"] * dense_site_params(self.net) / whole
        ends = wilson(self.metric, rows) if task.metrics[0] in FRACTIONS else self.interval
        return {
            "metric": self.metric, "interval": ends and list(ends), "initial": self.initial, **numbers,
            "stored": stored, "bytes": self.bytes,
        }  # fmt: skip


def reading_length(net: Model, task: Task) -> int:
    """Return the tokens at which ``net`` is measured: the task's, or fewer if it has fewer positions."""
    return min(task.length, usable_positions(net.config) or task.length)


def add_latency(entries: list[dict[str, Any]], nets: list[Model], task: Task) -> dict[str, Any]:
    """Time the models in turns, with one thread, batch 1 and the task's length; add the times to their entries.

    Models without values are not timed: all times are None.

    Returns:
        The evidence of the times: ``rounds``, ``spread`` (the largest p90 / p10), ``steady`` (whether that is small
        enough for them to be trusted), and ``speedup`` of the last model over the first with its ``verdict``.
    """
    shape = {"batch": 1, "length": (length := reading_length(nets[0], task)), "threads": 1}
    if any(net.device.type == "meta" for net in nets):
        for item in entries:
            item["latency_ms"] = {**dict.fromkeys(("median", "p10", "p90")), **shape}
        return {"rounds": 0, "spread": None, "steady": False, "speedup": None}
    times = forward_times(nets, length)
    for item, times_of_net in zip(entries, times, strict=True):
        item["latency_ms"] = {**summary(times_of_net), **shape}
    widest, gain = max(map(spread, times)), speedup(times[0], times[-1])
    return {"rounds": len(times[0]), "spread": widest, "steady": widest <= STEADY, "speedup": gain.entry()}


def build_report(
    task: Task, method: str, nets: dict[str, Measured], config: dict[str, Any], scores: Mapping[str, float]
) -> dict[str, Any]:
    """Measure every model and compare the last with the first.

    ``method`` is the name of the method, ``config`` the run's, ``nets`` {stage name: model}, the dense one first.
    ``scores`` are the last one's.
    """
    whole, rows = dense_site_params(next(iter(nets.values())).net), int(scores["val/rows"])
    stages = {name: measured.entry(task, whole, rows) for name, measured in track(nets.items(), "measure", len(nets))}
    timing = add_latency(list(stages.values()), [measured.net for measured in nets.values()], task)
    dense, *_, compressed = stages.values()
    metric = {
        "name": task.metrics[0], "mode": "max" if higher_is_better(task) else "min", "rows": rows,
        "available": scores.get("val/available"),
    }  # fmt: skip
    ratios = {
        "metric": compressed["metric"] / dense["metric"] if dense["metric"] else None,
        "params": {key: compressed["params"][key] / dense["params"][key] for key in dense["params"]},
        "flops": compressed["flops"] / dense["flops"] if dense["flops"] and compressed["flops"] else None,
        "bytes": compressed["bytes"] / dense["bytes"],
        "speedup": timing["speedup"]["median"] if timing["speedup"] else None,
    }
    return {
        "task": task.name, "method": method, "metric": metric,
        "dense": dense, "compressed": compressed, "ratios": ratios, "timing": timing, "stages": stages,
        "config": config, "versions": versions(), "hardware": hardware(),
    }  # fmt: skip


def of_program(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the bytes of the program, if there is one, and of integers its metric, and no times."""
    known = [key for key in ("metric", "interval", "bytes") if key in (report.get("program") or {})]
    if not known:
        return report
    small = report["compressed"] | {key: report["program"][key] for key in known}
    ratios, timing = report.get("ratios", {}), report.get("timing")
    if "metric" in known:
        small["latency_ms"] = small["latency_ms"] | dict.fromkeys(("median", "p10", "p90"))
        ratios, timing = ratios | {"speedup": None}, None
    return report | {
        "compressed": small, "stages": report["stages"] | {"compressed": small}, "timing": timing, "ratios": ratios,
    }  # fmt: skip
