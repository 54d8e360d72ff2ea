"""Tables and the figure of ``bench``'s measurements (export/bench.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.export.report import short
from lit_compress.utils.tables import screen_table
from lit_compress.utils.timing import STEADY, Speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

SpeedResult = dict[str, Any]
BUSY = f"?: the machine was busy, p90 is over {STEADY} times p10; such times are not to be trusted"


def gain_of(entry: dict[str, Any], name: str) -> Speedup | None:
    """Return the speed-up ``name`` of a model in a runtime; None if there is nothing to compare with."""
    gain = entry.get(name)
    return Speedup(gain["median"], gain["low"], gain["high"]) if gain else None


def rows(result: SpeedResult) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of times: one row for every shape and runtime."""
    nets = list(result["nets"])
    entries = [entry for shape in result["shapes"] for entry in shape["times"] if entry["net"] == nets[-1]]
    gains = {"over_dense": "speed-up", "over_eager": "over eager"}
    gains = {name: title for name, title in gains.items() if any(name in entry for entry in entries)}
    own, body = {length: name for name, length in result["own_lengths"].items()}, []
    for shape in result["shapes"]:
        label = f"{shape['batch']} x {shape['length']}" + f" ({own.get(shape['length'])})" * (shape["length"] in own)
        times = {(entry["net"], entry["runtime"]): entry for entry in shape["times"]}
        for runtime in dict.fromkeys(runtime for _, runtime in times):
            here = times.get((nets[-1], runtime), {})
            body.append([label, runtime, *(_times(times.get((net, runtime))) for net in nets),
                         *(str(gain_of(here, name) or "") for name in gains)])  # fmt: skip
            label = ""
    return ["batch x length", "runtime", *(f"{net} ms" for net in nets), *gains.values()], body


def _times(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    text = f"{short(entry['median'])} ({short(entry['p10'])}-{short(entry['p90'])})"
    return text if entry["steady"] else f"{text}?"


def is_busy(result: SpeedResult) -> bool:
    """Return whether some times are not to be trusted."""
    return not all(entry["steady"] for shape in result["shapes"] for entry in shape["times"])


def times_table(result: SpeedResult) -> Table:
    """Return the table of times for the terminal: median, p10 and p90 of a forward, and the speed-ups."""
    return screen_table(*rows(result), left=2, whole=2)


def programs_table(result: SpeedResult) -> Table:
    """Return the table of the memory and time to load a model in a runtime, in a separate process."""
    at = f"{result['memory_shape']['batch']} x {result['memory_shape']['length']}"
    header = ["runtime", "model", "difference", "MB", "ready after s", "first forward s", f"peak MiB, {at}"]
    if result["device"] != "cpu":
        header.append("GPU MiB")
    body = []
    for entry in result["programs"]:
        size, fresh = entry["bytes"], entry["fresh"]
        difference = f"{entry['difference']:.0e}{'!' * entry['far']}"
        row = [entry["runtime"], entry["net"], difference, "" if size is None else f"{size / 1e6:.1f}"]
        if fresh:
            row += [short(fresh["import_seconds"] + fresh["load_seconds"]), short(fresh["first_seconds"]),
                    f"{fresh['peak_mib']:,.0f}"]  # fmt: skip
            if result["device"] != "cpu":
                row.append("" if fresh["gpu_peak_mib"] is None else f"{fresh['gpu_peak_mib']:,.0f}")
        body.append(row)
    return screen_table(header, body, left=2, whole=2)


def far_line(entry: dict[str, Any], programs: list[dict[str, Any]]) -> str:
    """Return the warning on a program whose integers change the results by more than is usual.

    >>> far_line({"net": "dense", "runtime": "onnx-int8", "difference": 0.412}, [])
    '!: onnx-int8 of the dense model: its results differ from the float32 results by up to 41 % of the largest'
    >>> programs = [{"net": "dense", "runtime": "onnx", "dtype": "float32", "metric": 0.872}]
    >>> far_line({"net": "dense", "runtime": "onnx-int8", "difference": 0.412, "metric": 0.853}, programs)[-38:]
    'largest; dev metric 0.8530, not 0.8720'
    """
    said = (
        f"!: {entry['runtime']} of the {entry['net']} model: its results differ from the float32 results by up to "
        f"{100 * entry['difference']:.0f} % of the largest"
    )
    if entry.get("metric") is None:
        return said
    full = [p["metric"] for p in programs if p["net"] == entry["net"] and p["dtype"] == "float32"]
    return f"{said}; dev metric {entry['metric']:.4f}" + (f", not {full[0]:.4f}" if full else "")


def speed_figure(result: SpeedResult) -> Figure:
    """Draw the speed-up over the dense model by batch size, a panel for every length; without one, time per text.

    Bars are from p10 to p90. Hollow points are speed-ups that the spread does not carry, or times of a busy machine.
    """
    from matplotlib.figure import Figure

    nets = list(result["nets"])
    compared = "dense" in nets[:-1]
    lengths = sorted({shape["length"] for shape in result["shapes"]})
    figure = Figure(figsize=(1 + 2.9 * len(lengths), 3.8), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    batches = sorted({shape["batch"] for shape in result["shapes"]})
    runtimes = list(dict.fromkeys(e["runtime"] for shape in result["shapes"] for e in shape["times"]))
    for length, axes in zip(lengths, panels, strict=True):
        for number, runtime in enumerate(runtimes):
            points = [(shape["batch"], e) for shape in result["shapes"] if shape["length"] == length
                      for e in shape["times"] if (e["net"], e["runtime"]) == (nets[-1], runtime)]  # fmt: skip
            _draw(axes, points, compared, runtime, number, len(runtimes))
        axes.set(title=f"{length} tokens", xlabel="texts in a batch", xscale="log")
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if compared:
            axes.axhline(1, color="black", linewidth=0.8)
    panels[0].set_ylabel("speed-up over the dense model" if compared else "ms per text")
    if not compared:
        panels[0].set_yscale("log")
    panels[-1].legend(fontsize=8)
    threads, device = result["threads"], result["hardware"]["accelerator" if result["device"] != "cpu" else "cpu"]
    hollow = "too noisy to claim a speed-up" if compared else "of a busy machine"
    figure.suptitle(f"{device}, {threads} thread{'s' * (threads > 1)}; bars: p10 - p90; hollow: {hollow}", fontsize=9)
    return figure


def _draw(
    axes: Axes, points: list[tuple[int, dict[str, Any]]], compared: bool, label: str, number: int, count: int
) -> None:
    """Draw one runtime; points of one batch are a little next to each other."""
    colour, beside = f"C{number}", 1.06 ** (number - (count - 1) / 2)
    measured = []
    for batch, entry in points:
        if not compared:
            measured.append((batch, *(entry[key] / batch for key in ("median", "p10", "p90")), entry["steady"]))
        elif gain := gain_of(entry, "over_dense"):
            measured.append((batch, gain.median, gain.low, gain.high, gain.is_named))
    axes.plot([f[0] * beside for f in measured], [f[1] for f in measured], color=colour, linewidth=1, label=label)
    for batch, middle, low, high, sure in measured:
        bars = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.errorbar([batch * beside], [middle], bars, color=colour, marker="o", markersize=5, capsize=2,
                      markerfacecolor=colour if sure else "white")  # fmt: skip
