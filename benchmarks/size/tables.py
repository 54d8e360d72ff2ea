"""The tables and the picture of accuracy against megabytes, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import file_density, load, origin, percent, table
from benchmarks.size.int8 import CELLS as INT8_CELLS
from benchmarks.size.int8 import DENSITY, TASKS
from benchmarks.size.run import CELLS
from lit_compress.evaluation.intervals import standard_error

STUDY = "size"
TITLE = "Accuracy against megabytes"
ABOUT = "Budgets of `size=<N>MB` on SST-2, with one more way to a smaller file each time: blocks, table, vocabulary, 16 and 8 bits."
KEY = "val/accuracy"
# name of a group -> in the picture
LEGEND = {
    "blocks": "smaller blocks",
    "blocks, table": "smaller blocks and embeddings",
    "blocks, table, vocabulary": "smaller blocks and embeddings, unused words removed",
    "blocks, table, vocabulary, 16 bits": "smaller blocks and embeddings, unused words removed, 16-bit weights",
    "blocks, table in 8 bits, vocabulary, 16 bits": "smaller blocks, 8-bit embeddings, unused words removed, 16-bit weights",
}
SHOWN = {"dense": "dense", "second_order": "factors", "structures": "heads and neurons"}

HEAD = """## What a file of so many megabytes answers: MiniLM-L6-H384 on SST-2

Accuracy in % on the dev set (872 sentences, a standard error about 1.2) / on 2,000 held-out training phrases (0.7). The dense
file has {megabytes:.1f} MB and {dense} on the dev set. `factorize --budget size=<N>MB`: K-FAC, calibrated on 1,024 training
phrases, no training; `trained`: 1,000 steps after it, batches of 32, labels, logits and hidden states of the dense model. One seed.
![figure](figures/megabytes.png)
"""

INT8 = """## Programs of 8-bit integers

ONNX Runtime, weights and activations in 8 bits by `export --dtype int8`, next to the program in float32: the dense model of a task, and
that model without training at {density:g} of the blocks' matrices. Metric in % on the dev set; goal: at most 0.5 points below float32.
"""

INT8_TIMES = """How many times faster the program in 8 bits of the compressed model is, in turns, one thread, processor time; median (p10 - p90):
"""

# cells with a table of factors, which version 0.3 cannot make
OF_FACTORS = {"table": "blocks, table", "half": "blocks, table, vocabulary, 16 bits"}


def groups(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the results by what the picture calls them, the larger file first."""
    made: dict[str, list[dict[str, Any]]] = {}
    names = {cell: levers.name for cell, levers in CELLS.items()}
    for cell, what in {"blocks": names.pop("blocks"), **OF_FACTORS, **names}.items():
        for trained in (False, True):
            own = [r for r in results if r["cell"] == cell and bool(r["records"]) == trained]
            if own:
                made[f"trained, {what}" if trained else what] = sorted(own, key=lambda r: -r["megabytes"])
    return made


def sections() -> Iterator[str]:
    """Yield the table, if there are results."""
    results = load(STUDY)
    if not results:
        return
    dense = results[0]["dense"]
    yield HEAD.format(megabytes=dense["bytes"] / 1e6, dense=percent(dense["metric"]))
    yield table(
        ["what is smaller", "budget", "file", "of dense", "density of the blocks", "parameters", "accuracy"],
        [
            [
                name, f"{r['megabytes']:g} MB", f"{r['compressed']['bytes'] / 1e6:.2f} MB", f"{r['ratios']['bytes']:.3f}",
                f"{file_density(r):.3f}", f"{r['compressed']['params']['total']:,}",
                f"{percent(r['compressed']['metric'])} / {percent(r['held_out'][KEY])}",
            ]
            for name, group in groups(results).items()
            for r in group
        ],
    )  # fmt: skip
    yield origin(results[0], STUDY, 1)
    yield from int8()


def int8() -> Iterator[str]:
    """Yield the tables of programs of 8-bit integers, if there are results."""
    results = sorted(
        load(f"{STUDY}/int8"), key=lambda r: (list(TASKS).index(r["task"]), list(INT8_CELLS).index(r["cell"]))
    )
    if not results:
        return
    yield INT8.format(density=DENSITY)
    rows = []
    for r in results:
        plain, small = r["compressed"]["metric"], r["int8"]["metric"]
        rows.append([
            r["task"], r["metric"]["name"], SHOWN[r["cell"]], percent(plain), percent(small), f"{100 * (small - plain):+.1f}",
            f"{r['compressed']['bytes'] / 1e6:.1f} / {r['int8']['bytes'] / 1e6:.1f}",
        ])  # fmt: skip
    yield table(["task", "metric", "model", "float32", "int8", "points", "MB, float32 / int8"], rows)
    yield INT8_TIMES
    rows = [
        [
            r["task"], SHOWN[r["cell"]], f"{shape['texts']} x {shape['tokens']}",
            *(f"{gain['median']:.2f} ({gain['low']:.2f} - {gain['high']:.2f})" for gain in shape["faster_than"].values()),
        ]
        for r in results
        for shape in r.get("times", ())
    ]  # fmt: skip
    yield table(["task", "model", "texts x tokens", "than dense", "than dense int8", "than compressed float32"], rows)
    yield origin(results[0], f"{STUDY}/int8", results[0]["threads"])


def figures() -> Iterator[tuple[str, Any]]:
    """Yield name and figure of accuracy against megabytes."""
    from matplotlib.figure import Figure

    results = load(STUDY)
    if not results:
        return
    dense = results[0]["dense"]
    figure = Figure(figsize=(7.2, 5.6), layout="constrained", dpi=100)
    axes = figure.subplots()
    for name, group in groups(results).items():
        sizes = [r["compressed"]["bytes"] / 1e6 for r in group]
        trained = name.startswith("trained")
        bars = [100 * standard_error(r["compressed"]["interval"]) for r in group]
        axes.errorbar(
            sizes, [100 * r["compressed"]["metric"] for r in group], bars, capsize=2, elinewidth=0.8,
            fmt="*" if trained else "o-", markersize=11 if trained else 5, label=LEGEND[name.removeprefix("trained, ")] + ", trained" * trained,
        )  # fmt: skip
    error = 100 * standard_error(dense["interval"])
    axes.errorbar(
        dense["bytes"] / 1e6,
        100 * dense["metric"],
        error,
        fmt="ks",
        capsize=2,
        elinewidth=0.8,
        label="dense model",
    )
    axes.axhline(
        100 * dense["metric"] - 3, color="grey", linewidth=0.8, linestyle="--", label="3 points below the dense model"
    )
    ticks = [2, 3, 4, 6, 8, 10, 15, 20, 40, 60, 90]
    title = "SST-2, MiniLM-L6-H384, one seed; bars: one standard error"
    axes.set(xscale="log", xlabel="megabytes of the file", ylabel="dev accuracy in %", title=title)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(fontsize=9, loc="outside lower center", ncols=1, frameon=False)
    yield "megabytes", figure
