"""The report of a run: every number, measured on the models, of the dense, the compressed and all stages' models."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.evaluation.chance import near_chance
from lit_compress.evaluation.intervals import FRACTIONS, Interval, standard_error, wilson
from lit_compress.evaluation.metrics import higher_is_better
from lit_compress.models.accounting import dense_site_params, forward_times, measure
from lit_compress.models.budget import budget_line, verdict
from lit_compress.models.budget import shown as shown_value
from lit_compress.models.positions import usable_positions
from lit_compress.utils.devices import accelerator_name
from lit_compress.utils.errors import printable
from lit_compress.utils.progress import track
from lit_compress.utils.tables import escaped, markdown_table, print, screen_table
from lit_compress.utils.timing import STEADY, Speedup, processor, speedup, spread, summary
from lit_compress.version import __version__

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from lit_compress.tasks.records import Task

_PACKAGES = ("torch", "lightning", "transformers", "datasets", "torchmetrics")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend."""
    return {"lit_compress": __version__, "python": platform.python_version(), **{p: version(p) for p in _PACKAGES}}


def hardware() -> dict[str, Any]:
    """Return the machine: processor, cores, memory in GiB, accelerator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory and round(memory, 1),
        "accelerator": accelerator_name(),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with ``-dirty`` if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return described.stdout.strip() or None


def is_of_this_version(report: Mapping[str, Any]) -> bool:
    """Return whether this version wrote a report: the same release, and the same commit if both are of a checkout."""
    if (report.get("versions") or {}).get("lit_compress") != __version__:
        return False
    commits = (report.get("commit"), commit())
    return None in commits or commits[0] == commits[1]


@dataclass(frozen=True)
class Measured:
    """A model with its dev metric.

    Attributes:
        net: the model.
        bytes: of the files of its weights; of a model that was given, in the dtype of these.
        metric: dev metric.
        initial: dev metric before the first step of its stage, e.g. right after a factorization; None without training.
        kept: density that the method kept, if the file may store more (export/fuse.py); None: the file's density.
        merged: True if the file has merged matrices; then all stored weights count in its density, zeros too.
        interval: of the dev metric, in which 95 of 100 samples have it; None if it is not known.
    """

    net: PreTrainedModel
    bytes: int
    metric: float
    initial: float | None = None
    kept: float | None = None
    merged: bool = False
    interval: Interval | None = None

    def entry(self, task: Task, whole: int) -> dict[str, Any]:
        """Return the model's numbers for the report, without latency; FLOPs are at :func:`reading_length`.

        ``whole`` is the number of weights of the dense model's sites (the configuration of an ordinary export has
        smaller sizes).
        """
        numbers = measure(self.net, reading_length(self.net, task))
        stored = numbers["params"]["sites"] / whole
        numbers["density"] = stored if self.merged else numbers["density"] * dense_site_params(self.net) / whole
        return {
            "metric": self.metric,
            "initial": self.initial,
            **numbers,
            "kept": numbers["density"] if self.kept is None else self.kept,
            "stored": stored,
            "bytes": self.bytes,
        }


def reading_length(net: PreTrainedModel, task: Task) -> int:
    """Return the number of tokens at which ``net`` is measured: the task's, or less if it has fewer positions."""
    return min(task.length, usable_positions(net.config) or task.length)


def add_latency(entries: list[dict[str, Any]], nets: list[PreTrainedModel], task: Task) -> dict[str, Any]:
    """Time the models in turns, with one thread, batch 1 and the task's length; add the times to their entries.

    Returns:
        The evidence of the times: ``rounds``, ``spread`` (the largest p90 / p10), ``steady`` (whether that is small
        enough for them to be trusted), and ``speedup`` of the last model over the first with its ``verdict``.
    """
    length = reading_length(nets[0], task)
    times = forward_times(nets, length)
    for item, times_of_net in zip(entries, times, strict=True):
        item["latency_ms"] = {**summary(times_of_net), "batch": 1, "length": length, "threads": 1}
    widest, gain = max(map(spread, times)), speedup(times[0], times[-1])
    return {
        "rounds": len(times[0]), "spread": widest, "steady": widest <= STEADY,
        "speedup": {**asdict(gain), "verdict": gain.verdict},
    }  # fmt: skip


def build_report(task: Task, method: str, nets: dict[str, Measured], config: dict[str, Any]) -> dict[str, Any]:
    """Measure every model and compare the last with the first.

    Args:
        task: the task of the run.
        method: name of the method.
        nets: stage name -> model; the first is dense, the last the export.
        config: of the run.
    """
    whole = dense_site_params(next(iter(nets.values())).net)
    stages = {name: measured.entry(task, whole) for name, measured in track(nets.items(), "measure", len(nets))}
    timing = add_latency(list(stages.values()), [measured.net for measured in nets.values()], task)
    return compared(task, method, stages, timing, config)


def compared(
    task: Task, method: str, stages: dict[str, dict[str, Any]], timing: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """Return the report of models that were measured: stage -> its entry; the first is dense, the last the export."""
    dense, *_, compressed = stages.values()
    mode = "max" if higher_is_better(task) else "min"
    ratios = {
        "metric": compressed["metric"] / dense["metric"] if dense["metric"] else None,
        "params": {key: compressed["params"][key] / dense["params"][key] for key in dense["params"]},
        "flops": compressed["flops"] / dense["flops"] if dense["flops"] and compressed["flops"] else None,
        "bytes": compressed["bytes"] / dense["bytes"],
        "speedup": timing["speedup"]["median"] if timing["speedup"] else None,
    }
    return {
        "task": task.name, "method": method, "metric": {"name": task.metrics[0], "mode": mode},
        "dense": dense, "compressed": compressed, "ratios": ratios, "timing": timing, "stages": stages,
        "config": config, "versions": versions(), "hardware": hardware(), "commit": commit(),
    }  # fmt: skip


def add_intervals(report: dict[str, Any], intervals: Mapping[str, Interval | None]) -> None:
    """Add ``interval``, in which 95 of 100 samples have the metric, to every model; null if it was not computed.

    Args:
        report: with the number of rows of the metric.
        intervals: by stage, ``compressed`` for the export; for a fraction of rows it follows from the fraction.
    """
    of_rows = intervals.get("compressed") is not None and report["metric"]["name"] in FRACTIONS
    for name, entry in report["stages"].items():
        ends = wilson(entry["metric"], report["metric"]["rows"]) if of_rows else intervals.get(name)
        entry["interval"] = ends and list(ends)


def counted(report: dict[str, Any]) -> str:
    """Return of how many of how many rows the metric is, and of the training rows if it is not all: text for users.

    >>> counted({"metric": {"rows": 64, "available": 872}, "data": {"splits": [{"rows": 96, "available": 67349}]}})
    '64 of 872 rows; 96 of 67,349 training rows were used'
    """
    metric = report["metric"]
    train = ((report.get("data") or {}).get("splits") or [{"rows": 0, "available": 0}])[0]
    text = f"{of_all(metric['rows'], metric.get('available'))} rows"
    if train["rows"] < train["available"]:
        text += f"; {of_all(train['rows'], train['available'])} training rows were used"
    return text


def of_all(used: int, available: int | None) -> str:
    """Return a number of rows, of how many it is: ``64 of 872``; the number alone if the rows are one text."""
    return f"{used:,}" if available is None else f"{used:,} of {available:,}"


def score_line(report: dict[str, Any]) -> str:
    """Return the metric of the compressed model with its standard error and its number of rows, for the screen."""
    compressed, metric = report["compressed"], report["metric"]
    rows = f" ({counted(report)})" if "rows" in metric else ""  # not in reports of earlier versions
    return f"dev {metric['name']} {compressed['metric']:.4f} {_error(compressed)}".rstrip() + rows


def final_metric(report: dict[str, Any]) -> float:
    """Return the dev metric that counts for the export: of its program of integers, if it has one."""
    return float((report.get("program") or {}).get("metric", report["compressed"]["metric"]))


def of_program(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the metric, its interval and the bytes of the program of integers, if there is one.

    The times are the model's in PyTorch. They are left out.
    """
    if "metric" not in (made := report.get("program") or {}):
        return report
    small = report["compressed"] | {key: made[key] for key in ("metric", "interval", "bytes")}
    small["latency_ms"] = small["latency_ms"] | dict.fromkeys(("median", "p10", "p90"))
    ratios = {key: small[key] / report["dense"][key] if report["dense"][key] else None for key in ("metric", "bytes")}
    return report | {
        "compressed": small, "stages": report["stages"] | {"compressed": small}, "timing": None,
        "ratios": report["ratios"] | ratios | {"speedup": None},
    }  # fmt: skip


def points_lost(report: dict[str, Any]) -> float:
    """Return by how many points the export is worse than the dense model; below 0 it is better.

    A point is a hundredth of a metric whose higher values are better, 1 of a perplexity.
    """
    lost = report["dense"]["metric"] - final_metric(report)
    return 100 * lost if report["metric"]["mode"] == "max" else -lost


def _error(entry: dict[str, Any]) -> str:
    """Return the standard error of a model's metric; empty where it is not known."""
    ends: Interval | None = entry.get("interval")
    return f"± {standard_error(ends):.4f}" if ends else ""


def short(value: float) -> str:
    """Return three digits: four columns with more would not fit the screen."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _timed(entry: dict[str, Any], key: str, show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Return a model's latency as it is shown; empty where it was not timed."""
    milliseconds = entry["latency_ms"][key]
    return "" if milliseconds is None else show(milliseconds)


_Show = Callable[[dict[str, Any]], str]


def _number(*path: str) -> Callable[[dict[str, Any]], float]:
    """Return a function that reads the number at ``path`` of a model's entry."""

    def read(entry: dict[str, Any]) -> float:
        for key in path:
            entry = entry[key]
        return entry  # type: ignore[return-value]

    return read


# label; how a model's value is shown; what its ratio to the dense model's is made of, None: it has none
_ROWS: tuple[tuple[str, _Show, Callable[[dict[str, Any]], float] | None], ...] = (
    ("{metric}", lambda e: f"{e['metric']:.4f}", _number("metric")),
    ("   standard error", _error, None),
    ("   before training", lambda e: "" if e["initial"] is None else f"{e['initial']:.4f}", None),
    ("site density", lambda e: f"{e['density']:.4f}", None),
    ("   kept by the method", lambda e: "" if e.get("kept") in (None, e["density"]) else f"{e['kept']:.4f}", None),
    ("   stored, with zeros", lambda e: "" if e.get("stored") in (None, e["density"]) else f"{e['stored']:.4f}", None),
    ("site parameters", lambda e: f"{e['params']['sites']:,}", _number("params", "sites")),
    ("non-embedding parameters", lambda e: f"{e['params']['non_embedding']:,}", _number("params", "non_embedding")),
    ("total parameters", lambda e: f"{e['params']['total']:,}", _number("params", "total")),
    ("MFLOPs, 1 x {length} tokens", lambda e: f"{e['flops'] / 1e6:,.1f}" if e["flops"] else "", _number("flops")),
    ("bytes on disk", lambda e: f"{e['bytes']:,}", _number("bytes")),
    ("CPU latency ms, median", lambda e: _timed(e, "median"), _number("latency_ms", "median")),
    ("   p10 - p90", lambda e: " - ".join(filter(None, (_timed(e, key, short) for key in ("p10", "p90")))), None),
)
_SPEED = "CPU latency ms, median"


def rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the final table; its last column is compressed / dense, or the speed-up."""
    names = list(report["stages"])
    words = {"metric": f"dev {report['metric']['name']}", "length": report["dense"]["latency_ms"]["length"]}
    header = [f"{report['method']} on {report['task']}", *names, "ratio"]
    body = []
    for label, show, value in _ROWS:
        shown = [show(report["stages"][name]) for name in names]
        if any(shown):
            body.append([label.format(**words), *shown, _ratio(report, label, value)])
    if budget := report.get("budget"):
        reached = shown_value(budget["kind"], budget["reached"])
        body.append([f"budget {budget['asked']}", *[""] * (len(names) - 1), reached, verdict(budget["met"])])
    return header, body


def _ratio(report: dict[str, Any], label: str, value: Callable[[dict[str, Any]], float] | None) -> str:
    if value is None or not (dense := value(report["dense"])) or not (small := value(report["compressed"])):
        return ""
    if label != _SPEED:
        return f"{small / dense:.3f}" + " (chance)" * bool(label == "{metric}" and near_chance(report))
    if gain := speedup_of(report):
        return f"{gain.median:.2f}x" if gain.is_named else "noise"
    return f"{dense / small:.2f}x"


def speedup_of(report: dict[str, Any]) -> Speedup | None:
    """Return the speed-up of the compressed model; None in reports of earlier versions, which have one number only."""
    gain = (report.get("timing") or {}).get("speedup")
    return gain and Speedup(*(gain[key] for key in ("median", "low", "high")))


def speed_lines(report: dict[str, Any]) -> list[str]:
    """Return the line on the latency, for the screen and the card: the speed-up, or "too noisy"."""
    if not (gain := speedup_of(report)):
        return []
    timing = report["timing"]
    busy = f"the times are not to be trusted: the machine was busy, p90 is up to {timing['spread']:.1f} times p10"
    return [f"speed-up {gain}", *([] if timing["steady"] else [busy])]


def program_speed_lines(report: dict[str, Any]) -> list[str]:
    """Return how much faster the program of the budget's runtime is than the dense model's, for the screen."""
    if not (speed := report.get("speed")):
        return []
    where = "one thread" if (device := speed.get("device", "cpu")) == "cpu" else f"{speed['dtype']} on {device}"
    return [f"speed-up in {speed['runtime']}, {where}: {gain_words(speed['shapes'])}"]


def gain_words(gains: Sequence[Mapping[str, Any]]) -> str:
    """Return speed-ups for users.

    >>> gain_words([{"batch": 1, "length": 32, "median": 2.11, "low": 1.94, "high": 2.3}])
    '1 x 32: 2.11x (1.94-2.30)'
    """
    return ", ".join(
        f"{gain['batch']} x {gain['length']}: {Speedup(gain['median'], gain['low'], gain['high'])}" for gain in gains
    )


WIDEST = 100  # characters of a text on the screen


def generation_lines(report: dict[str, Any]) -> list[str]:
    """Return how both models continue with a prompt, for the screen; [] for models that do not write."""
    if not (generation := report.get("generation")):
        return []
    texts = {key: printable(" ".join(generation[key].split())) for key in ("prompt", "dense", "compressed")}
    texts = {key: text if len(text) <= WIDEST else f"{text[:WIDEST]} …" for key, text in texts.items()}
    return [f"{key}: {text}" for key, text in texts.items()] + [same_tokens(generation)]


def same_tokens(generation: dict[str, Any]) -> str:
    """Return how far the two continuations are the same.

    >>> same_tokens({"same": 3, "tokens": 20})
    'the first 3 of 20 tokens are the same'
    """
    same, tokens = generation["same"], generation["tokens"]
    return f"the first {same} of {tokens} tokens are the same" if same < tokens else f"all {tokens} tokens are the same"


def table(report: dict[str, Any]) -> Table:
    """Return the final table for the terminal and for a log: at most 100 columns for four models of BERT's size."""
    header, body = rows(report)
    return screen_table(header, body, whole=len(header))


def print_table(report: dict[str, Any]) -> None:
    """Print the final table, the score and the speed-up; into a file the table is as wide as it needs to be."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ± where the log is ASCII: no reason to fail at the end of a run
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=120)).print(table(report))
    print(score_line(report), *speed_lines(report), *program_speed_lines(report), *generation_lines(report), sep="\n")
    if budget := report.get("budget"):
        print(budget_line(budget))


def markdown(report: dict[str, Any]) -> str:
    """Return the final table as Markdown, for TensorBoard and the model card."""
    header, body = rows(report)
    return markdown_table([*map(escaped, header)], ([escaped(cell) for cell in row] for row in body))
