"""The tables of ``bench``'s measurements (export/bench.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.analysis.costs import front
from lit_compress.utils.tables import screen_table
from lit_compress.utils.timing import STEADY, Speedup

if TYPE_CHECKING:
    from rich.table import Table

SpeedResult = dict[str, Any]
BUSY = f"?: the machine was busy, p90 is over {STEADY} times p10; such times are only rough"


def short(value: float) -> str:
    """Return three digits: four columns with more would not fit the screen."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def gain_of(entry: dict[str, Any], name: str) -> Speedup | None:
    """Return the speed-up ``name`` of a model in a runtime; None if there is nothing to compare with."""
    gain = entry.get(name)
    return Speedup.of(gain) if gain else None


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
    """Return whether the machine was busy at some times."""
    return not all(entry["steady"] for shape in result["shapes"] for entry in shape["times"])


def times_table(result: SpeedResult) -> Table:
    """Return the table of times for the terminal: median, p10 and p90 of a forward, and the speed-ups."""
    return screen_table(*rows(result), left=2, whole=2)


def programs_table(result: SpeedResult) -> Table:
    """Return the table of the programs: difference from PyTorch's results, and megabytes of the file."""
    header, body = ["runtime", "model", "difference", "MB"], []
    for entry in result["programs"]:
        size, difference = entry["bytes"], f"{entry['difference']:.0e}{'!' * entry['far']}"
        body.append([entry["runtime"], entry["net"], difference, "" if size is None else f"{size / 1e6:.1f}"])
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


def alternatives_table(result: dict[str, Any]) -> Table:
    """Return the table of ``bench --against``: metric, megabytes, time and throughput of every model and runtime.

    Rows without a metric or a time are left out. ``front`` names the costs at which no other row is better in both.
    """
    first, last = _shapes_shown(result)
    one, many = ({(e["net"], e["runtime"]): e for e in shape["times"]} for shape in (first, last))
    known = [p for p in result["programs"]
             if p.get("metric") is not None and (p["net"], p["runtime"]) in one.keys() & many.keys()]  # fmt: skip
    costs = [{"ms": one[p["net"], p["runtime"]]["median"], "MB": p["bytes"] and p["bytes"] / 1e6} for p in known]
    fronts = {
        name: front([(c[name], p["metric"]) for c, p in zip(costs, known, strict=True) if c[name] is not None],
                    result["metric"]["mode"]) for name in ("ms", "MB")
    }  # fmt: skip
    header = ["model", "runtime", result["metric"]["name"], "MB", f"ms, {first['batch']} x {first['length']}",
              f"texts/s, {last['batch']} x {last['length']}", "front"]  # fmt: skip
    body = []
    for entry, cost in zip(known, costs, strict=True):
        key = entry["net"], entry["runtime"]
        low, high = entry["interval"] or (None, None)
        error = "" if low is None or high is None else f" ± {(high - low) / 2:.4f}"
        noisy = "" if one[key]["steady"] and many[key]["steady"] else "?"
        best = ", ".join(name for name in fronts if (cost[name], entry["metric"]) in fronts[name])
        body.append([*key, f"{entry['metric']:.4f}{error}{'!' * entry['far']}",
                     "" if cost["MB"] is None else f"{cost['MB']:.1f}", f"{cost['ms']:.2f}{noisy}",
                     f"{1000 * last['batch'] / many[key]['median']:,.0f}{noisy}", best])  # fmt: skip
    return screen_table(header, body, left=2, whole=2)


def _shapes_shown(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shapes with the smallest and the largest batch, at the median length of the task if it is there."""
    lengths = [shape["length"] for shape in result["shapes"]]
    median = result["own_lengths"].get("median")
    length = median if median in lengths else min(lengths)
    at = sorted((shape for shape in result["shapes"] if shape["length"] == length), key=lambda shape: shape["batch"])
    return at[0], at[-1]
