"""The front table of every task, from results/front/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from benchmarks.common import HERE, load, origin, percent, table
from benchmarks.comparison.front import BASE, ROWS, SCRIPT, TIMES
from lit_compress.evaluation.intervals import standard_error
from lit_compress.run.pictures import looks

NAMES = {"sst2": "SST-2", "stsb": "STS-B", "mrpc": "MRPC", "qnli": "QNLI"}
SCORES = {"accuracy": "accuracy", "pearson_spearman": "mean of Pearson's and Spearman's correlation"}

PICTURE = """## 8-bit programs: metric and megabytes

![Metric of 8-bit programs over megabytes](figures/front.png)

Bars: one standard error. Static vectors are far below. They are in the tables, as is every program with the
vocabulary of the data.
"""
HEAD = """## {task}: 8-bit programs, beside what a user would pick instead

Programs of OpenVINO: 8 bits, but the first row (32 bits). Static vectors are 16 bits, in NumPy. {metric} in %
on the dev set ({rows:,} rows) ± a standard error. Speed relative to the program of the dense model in 8 bits
(texts x tokens), in turns, {threads} thread of a processor {vnni} VNNI, processor time: median (p10 - p90) of {rounds}
rounds. {seeds}; trained in {precision}. The last two columns are of the same program with the vocabulary of the data.
"""
# of a line in the picture: its label, and how the keys of its rows begin
LINES = {
    "dense, int8": BASE,
    "Layers, 2 and 3 of 6": "layers",
    "CoFi, 0.10": "cofi",
    "SecondOrder, heads and neurons, 0.25 to 0.03": "structures",
    "SecondOrder, components, 0.10": "components",
}
MISSING = "Rows whose runs are not finished: {labels}.\n"


def fronts() -> Iterator[tuple[str, dict[str, dict[str, Any]], dict[str, Any] | None]]:
    """Yield every task with its rows and its times."""
    results = load(SCRIPT)
    for task in dict.fromkeys(result["task"] for result in results):
        own = {result["row"]: result for result in results if result["task"] == task and "row" in result}
        times = [result for result in results if result["file"] == f"{task}-{TIMES}"]
        yield task, {key: own[key] for key in ROWS if key in own}, times[0] if times else None


def scored(made: dict[str, Any]) -> str:
    """Return a metric with its standard error."""
    return f"{percent(made['metric'])} ± {percent(standard_error(made['interval']))}"


def speed(times: dict[str, Any] | None, shape: int, key: str) -> str:
    """Return how many times faster than the dense program in 8 bits a row is; empty if it was not timed."""
    gain = times and times["shapes"][shape]["faster"].get(key)
    if not gain:
        return ""
    return "1" if key == BASE else f"{gain['median']:.1f} ({gain['low']:.1f} - {gain['high']:.1f})"


def has_vnni(times: dict[str, Any] | None) -> bool:
    """Return whether the processor adds products of 8-bit integers in 32 bits; times without the key: it does not."""
    return bool(times and times.get("vnni"))


def sections() -> Iterator[str]:
    """Yield the picture, what the programs' numbers say, and the table of every task, if there are results."""
    if any(times for *_, times in fronts()):
        yield PICTURE
        yield (HERE / "comparison" / "findings_programs.md").read_text()
    for task, rows, times in fronts():
        first = next(iter(rows.values()))
        name = first["program"]["name"]
        measure = SCORES.get(name, name)
        yield HEAD.format(
            task=NAMES.get(task, task), metric=measure[0].upper() + measure[1:], rows=first["program"]["rows"],
            threads=first["threads"], rounds=times["shapes"][0]["rounds"] if times else 0,
            vnni="with" if has_vnni(times) else "without",
            precision=" and ".join(sorted({row["precision"] for row in rows.values()})),
            seeds="One seed" if len({row["seed"] for row in rows.values()}) == 1 else "Several seeds",
        )  # fmt: skip
        shapes = [f"{shape['texts']} x {shape['tokens']}" for shape in times["shapes"]] if times else []
        head = ["model", "metric", "of dense", "MB", *shapes, "MB, the data's vocabulary", "metric"]
        yield table(head, [_cells(key, row, times, len(shapes)) for key, row in rows.items()])
        if left := [ROWS[key].shown for key in ROWS if key not in rows]:
            yield MISSING.format(labels="; ".join(left))
        yield origin(first, SCRIPT, first["threads"])


def _cells(key: str, row: dict[str, Any], times: dict[str, Any] | None, shapes: int) -> list[str]:
    made, small = row["program"], row.get("vocabulary")
    return [
        ROWS[key].shown, scored(made), percent(made["metric"] / made["dense"]), f"{made['bytes'] / 1e6:.1f}",
        *(speed(times, number, key) for number in range(shapes)),
        *((f"{small['bytes'] / 1e6:.1f}", scored(small)) if small else ("", "")),
    ]  # fmt: skip


def short() -> str:
    """Return the rows that every timed task has: metric on each, size, and speeds at all shapes.

    Size and speeds are those of the first task, and with VNNI of the first that was timed on such a processor.
    """
    timed = [(task, rows, times) for task, rows, times in fronts() if times]
    keys = [key for key in ROWS if all(key in rows for _, rows, _ in timed)]
    kinds = {"speed": False, "speed with VNNI": True}
    speeds = {
        name: next(times for *_, times in timed if has_vnni(times) is vnni)
        for name, vnni in kinds.items()
        if any(has_vnni(times) is vnni for *_, times in timed)
    }

    def sizes(row: dict[str, Any]) -> str:
        made = [row[part]["bytes"] for part in ("program", "vocabulary") if part in row]
        return " / ".join(f"{size / 1e6:.1f}" for size in made)

    def gains(times: dict[str, Any], key: str) -> str:
        made = [speed(times, shape, key).split(" ")[0] for shape in range(len(times["shapes"]))]
        return " / ".join(filter(None, made))

    return table(["program", *(NAMES[task] for task, *_ in timed), "MB", *speeds], [
        [
            ROWS[key].shown, *(scored(rows[key]["program"]) for _, rows, _ in timed), sizes(timed[0][1][key]),
            *(gains(times, key) for times in speeds.values()),
        ]
        for key in keys
    ])  # fmt: skip


def figure() -> Any:
    """Return the picture of metric and megabytes, a panel for each timed task."""
    from matplotlib.figure import Figure

    timed = [(task, rows) for task, rows, times in fronts() if times]
    across, down = min(len(timed), 2), ceil(len(timed) / 2)
    made = Figure(figsize=(7.2 * across, 5 * down), layout="constrained", dpi=100)
    for place, (task, rows) in enumerate(timed, 1):
        axes = made.add_subplot(down, across, place)
        for label, look in looks(LINES).items():
            programs = [row["program"] for key, row in rows.items() if key.startswith(LINES[label])]
            axes.errorbar(
                [program["bytes"] / 1e6 for program in programs], [100 * program["metric"] for program in programs],
                [100 * standard_error(program["interval"]) for program in programs], capsize=2, elinewidth=0.8,
                linewidth=1, **look, markersize=6, label=label,
            )  # fmt: skip
        dense = rows["dense"]["program"]
        label = f"dense, float32: {dense['bytes'] / 1e6:.0f} MB"
        axes.axhline(100 * dense["metric"], color="grey", linewidth=0.8, linestyle="--", label=label)
        axes.set(
            xlabel="megabytes of the program",
            ylabel="dev metric in %",
            title=NAMES[task],
        )
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    made.suptitle("8-bit programs of MiniLM-L6-H384")
    made.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return made
