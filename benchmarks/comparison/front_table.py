"""The front table of every task, from results/front/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import load, origin, percent, table
from benchmarks.comparison.front import BASE, ROWS, SCRIPT, TIMES

HEAD = """## {task}: 8-bit programs, beside what a user would pick instead

Programs of OpenVINO: 8 bits, but the first row (32 bits). Static vectors are 16 bits, in NumPy. {metric} in %
on the dev set ({rows:,} rows) ± a standard error. Speed relative to the program of the dense model in 8 bits
(texts x tokens), in turns, {threads} thread, processor time: median (p10 - p90) of {rounds} rounds. {seeds}; trained in
{precision}. The last two columns are of the same program with the vocabulary of the data.
"""
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
    low, high = made["interval"] or (None, None)
    return percent(made["metric"]) + ("" if low is None or high is None else f" ± {percent((high - low) / 3.92)}")


def speed(times: dict[str, Any] | None, shape: int, key: str) -> str:
    """Return how many times faster than the dense program in 8 bits a row is; empty if it was not timed."""
    gain = times and times["shapes"][shape]["faster"].get(key)
    if not gain:
        return ""
    return "1" if key == BASE else f"{gain['median']:.1f} ({gain['low']:.1f} - {gain['high']:.1f})"


def sections() -> Iterator[str]:
    """Yield the table of every task, if there are results."""
    from benchmarks.comparison.tables import NAMES, SCORES

    for task, rows, times in fronts():
        first = next(iter(rows.values()))
        name = first["program"]["name"]
        measure = SCORES.get(name, name)
        yield HEAD.format(
            task=NAMES.get(task, task), metric=measure[0].upper() + measure[1:], rows=first["program"]["rows"],
            threads=first["threads"], rounds=times["shapes"][0]["rounds"] if times else 0,
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
    """Return the rows that every timed task has: metric on each, then size and speed of 32 texts of 32 tokens."""
    from benchmarks.comparison.tables import NAMES

    timed = [(task, rows, times) for task, rows, times in fronts() if times]
    keys = [key for key in ROWS if all(key in rows for _, rows, _ in timed)]
    _, first, times = timed[0]
    (shape,) = (i for i, one in enumerate(times["shapes"]) if (one["texts"], one["tokens"]) == (32, 32))
    head = ["program", *(NAMES[task] for task, *_ in timed), "MB", "speed"]
    return table(head, [
        [
            ROWS[key].shown, *(scored(rows[key]["program"]) for _, rows, _ in timed),
            f"{first[key]['program']['bytes'] / 1e6:.1f}", speed(times, shape, key).split(" ")[0] + "x",
        ]
        for key in keys
    ])  # fmt: skip
