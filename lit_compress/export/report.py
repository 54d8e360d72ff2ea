"""The report of a run: every number measured on the nets themselves, dense beside compressed."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress import __version__
from lit_compress.budget import dense_site_params, latency, measure
from lit_compress.metrics import higher_is_better
from lit_compress.progress import track

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from lit_compress.tasks import Task

_PACKAGES = ("torch", "lightning", "transformers", "datasets", "torchmetrics")


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    return {
        "lit_compress": __version__,
        "python": platform.python_version(),
        **{p: version(p) for p in _PACKAGES},
    }


def hardware() -> dict[str, Any]:
    """Return the machine: processor, cores, memory in GiB, accelerator."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "memory_gib": memory and round(memory, 1),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def commit() -> str | None:
    """Return the commit of this checkout, with ``-dirty`` if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    found = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or None


@dataclass(frozen=True)
class Measured:
    """A net and what is known of it.

    Attributes:
        net: as loaded from ``folder``.
        folder: where its ``model.safetensors`` stands.
        metric: of the dev set.
        initial: the same before its stage trained: right after a factorization, for one; None if there was no training.
        kept: density of what the method kept, where the net may store more (export/fuse.py); None: count it in the net.
    """

    net: PreTrainedModel
    folder: Path
    metric: float
    initial: float | None = None
    kept: float | None = None

    def entry(self, task: Task, whole: int) -> dict[str, Any]:
        """Return what the report says of the net, without its latency; FLOPs at :func:`reading_length`.

        ``whole``: weights of the dense net's sites; the configuration of an ordinary export has smaller sizes.
        """
        found = measure(self.net, reading_length(self.net, task))
        return {
            "metric": self.metric,
            "initial": self.initial,
            **found,
            "density": found["density"] if self.kept is None else self.kept,
            "stored": found["params"]["sites"] / whole,
            "bytes": (self.folder / "model.safetensors").stat().st_size,
        }


def reading_length(net: PreTrainedModel, task: Task) -> int:
    """Return the tokens at which ``net`` is measured: the task's length, less if the net has fewer positions."""
    return min(task.length, getattr(net.config, "max_position_embeddings", task.length + 4) - 4)


def add_latency(entries: list[dict[str, Any]], nets: list[PreTrainedModel], task: Task) -> None:
    """Time the nets against each other, one thread, batch 1, the task's length, and add it to their entries."""
    for item, times in zip(entries, latency(nets, reading_length(nets[0], task)), strict=True):
        item["latency_ms"] = times


def build_report(task: Task, method: str, nets: dict[str, Measured], config: dict[str, Any]) -> dict[str, Any]:
    """Measure every net and compare the last with the first.

    Args:
        task: what they do.
        method: name of the method.
        nets: stage name -> net; the first is dense, the last the export.
        config: of the run.
    """
    whole = dense_site_params(next(iter(nets.values())).net)
    stages = {name: measured.entry(task, whole) for name, measured in track(nets.items(), "measure", len(nets))}
    add_latency(list(stages.values()), [measured.net for measured in nets.values()], task)
    dense, *_, compressed = stages.values()
    mode = "max" if higher_is_better(task) else "min"
    ratios = {
        "metric": compressed["metric"] / dense["metric"] if dense["metric"] else None,
        "params": {key: compressed["params"][key] / dense["params"][key] for key in dense["params"]},
        "flops": compressed["flops"] / dense["flops"],
        "bytes": compressed["bytes"] / dense["bytes"],
        "speedup": dense["latency_ms"]["median"] / compressed["latency_ms"]["median"],
    }
    return {
        "task": task.name, "method": method, "metric": {"name": task.metrics[0], "mode": mode},
        "dense": dense, "compressed": compressed, "ratios": ratios, "stages": stages,
        "config": config, "versions": versions(), "hardware": hardware(), "commit": commit(),
    }  # fmt: skip


_ROWS = (
    ("{metric}", lambda e: f"{e['metric']:.4f}"),
    ("   before training", lambda e: "" if e["initial"] is None else f"{e['initial']:.4f}"),
    ("site density", lambda e: f"{e['density']:.4f}"),
    ("   stored", lambda e: "" if e.get("stored") in (None, e["density"]) else f"{e['stored']:.4f}"),
    ("site parameters", lambda e: f"{e['params']['sites']:,}"),
    ("non-embedding parameters", lambda e: f"{e['params']['non_embedding']:,}"),
    ("total parameters", lambda e: f"{e['params']['total']:,}"),
    ("MFLOPs, 1 x {length} tokens", lambda e: f"{e['flops'] / 1e6:,.1f}"),
    ("bytes on disk", lambda e: f"{e['bytes']:,}"),
    ("CPU latency ms, median", lambda e: f"{e['latency_ms']['median']:.2f}"),
    ("   p10 - p90", lambda e: f"{e['latency_ms']['p10']:.2f} - {e['latency_ms']['p90']:.2f}"),
)


def rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the final table."""
    names = list(report["stages"])
    words = {"metric": f"dev {report['metric']['name']}", "length": report["dense"]["latency_ms"]["length"]}
    header = [f"{report['method']} on {report['task']}", *names]
    body = [[label.format(**words), *(show(report["stages"][n]) for n in names)] for label, show in _ROWS]
    return header, [row for row in body if any(row[1:])]


def table(report: dict[str, Any]) -> Table:
    """Return the final table for the terminal."""
    from rich.table import Table

    header, body = rows(report)
    shown = Table(title=None)
    for i, name in enumerate(header):
        shown.add_column(name, justify="left" if i == 0 else "right")
    for row in body:
        shown.add_row(*row)
    return shown


def markdown(report: dict[str, Any]) -> str:
    """Return the final table as Markdown, for TensorBoard and the model card."""
    header, body = rows(report)
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cell.strip() for cell in row) + " |" for row in body)])
