"""The tables of the comparisons and their pictures, from results/<task>.json and results/<task>/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

from benchmarks.common import comparison, file_density, load, origin, percent, table
from benchmarks.comparison import front_table
from lit_compress.evaluation.intervals import standard_error
from lit_compress.export.report import of_program

STUDY = "comparison"
TITLE = "All methods by one command"
ABOUT = "`compare` on SST-2, STS-B, MRPC and QNLI: one teacher trained to its end, as many steps for every method, one learning rate, the best epoch chosen on held-out rows."
NAMES = {"sst2": "SST-2", "stsb": "STS-B", "mrpc": "MRPC", "qnli": "QNLI"}
SCORES = {
    "accuracy": "accuracy",
    "pearson_spearman": "mean of Pearson's and Spearman's correlation",
}

HEAD = """## {task} with MiniLM-L6-H384: a teacher of {epochs} epochs on all rows, {updates:,} steps after it

{fairness}
Learning rates: {rates}; seeds: {seeds}. In %: {metric}, on the dev set ({rows:,} rows, a standard error {error}) / on the held-out
rows; the dense model has {dense}. Of dense: dev. Steps and minutes: all stages after the teacher, on a shared machine.
"""  # fmt: skip

PROGRAMS = "Rows of 8-bit programs have the program's dev score and bytes. It was not timed here, nor scored on held-out rows.\n"
COLUMNS = [
    "budget",
    "method",
    "density",
    "dev",
    "held out",
    "of dense",
    "FLOPs",
    "speed-up",
    "bytes",
    "steps",
    "minutes",
]
STORED = "Single weights. Their zeros are stored: **the file is not smaller**.\n"
MISSING = "Not run at {budget}: {labels}.\n"
ONLY = "At {budgets} only the rows above were run.\n"

PICTURE = """![Pareto fronts on {task}](figures/{name}.png)

"""

CLAIMS = """### Claims that could be decided on {task}
"""


def comparisons() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield every comparison and its finished runs at a density, the best on the dev set first within a density.

    Runs with a budget of another kind are in the front table.
    """
    found = {made["file"]: made for made in load(STUDY)}
    for task in NAMES:
        if task in found:
            runs = [of_its_program(run) for run in load(f"{STUDY}/{task}") if run["asked"].startswith("density=")]
            yield found[task], sorted(runs, key=lambda run: (-_asked(run), -run["compressed"]["metric"]))


def of_its_program(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run as :func:`of_program`; the held-out rows were scored before there was a program."""
    small = of_program(run)
    return run if small is run else small | {"held_out": None}


def _times(gain: float | None) -> str:
    return "" if gain is None else f"{gain:.2f}x"


def _asked(run: dict[str, Any]) -> float:
    return float(run["asked"].removeprefix("density="))


def _held_out(scores: dict[str, float] | None, made: dict[str, Any]) -> str:
    return percent(scores[f"val/{made['metric']['name']}"]) if scores else ""


def smaller(run: dict[str, Any]) -> bool:
    """Return whether a run's file is smaller than the dense one: single weights that are zero are stored."""
    return bool(run["ratios"]["bytes"] < 0.99)


def _table(made: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    return table(COLUMNS, [
        [
            f"{_asked(run):g}", run["label"], f"{file_density(run):.3f}", percent(run["compressed"]["metric"]),
            _held_out(run["held_out"], made), percent(run["compressed"]["metric"] / run["dense"]["metric"]),
            _times(1 / run["ratios"]["flops"]), _times(run["ratios"]["speedup"]), f"{run['ratios']['bytes']:.3f}",
            f"{sum(record['steps'] for record in run['records'][1:]):,}", f"{run['seconds'] / 60:.0f}",
        ]
        for run in runs
    ])  # fmt: skip


def sections() -> Iterator[str]:
    """Yield the tables of every task, if there are results."""
    for made, runs in comparisons():
        dense, config = runs[0]["dense"], made["config"]
        low, high = dense["interval"]
        yield HEAD.format(
            task=NAMES[made["name"]], epochs=config["teacher"]["model.dense.epochs"], fairness=made["fairness"],
            updates=config["updates"], rates=", ".join(f"{float(rate):g}" for rate in config["learning_rates"]),
            seeds=", ".join(map(str, config["seeds"])), rows=made["metric"]["rows"],
            metric=SCORES[made["metric"]["name"]], error=percent((high - low) / 3.92),
            dense=f"{percent(dense['metric'])} / {_held_out(made['teachers_held_out'][0], made)}",
        )  # fmt: skip
        small = [run for run in runs if smaller(run)]
        yield _table(made, small)
        if rest := [run for run in runs if run not in small]:
            yield STORED
            yield _table(made, rest)
        if any(run["ratios"]["speedup"] is None for run in runs):
            yield PROGRAMS
        done = {(run["label"], _asked(run)) for run in runs}
        first, *others = sorted({budget for _, budget in done}, key=lambda b: -len([d for d in done if d[1] == b]))
        asked = {label: (row or {}).get("budgets", [first]) for label, row in comparison()["methods"].items()}
        left = [label for label, budgets in asked.items() if first in budgets and (label, first) not in done]
        if left:
            yield MISSING.format(budget=f"{first:g}", labels="; ".join(left))
        if others:
            yield ONLY.format(budgets=" and ".join(f"{budget:g}" for budget in sorted(others, reverse=True)))
        yield PICTURE.format(task=NAMES[made["name"]], name=made["name"])
        if decided := [claim for claim in made["claims"] if claim["verdict"] != "not measured"]:
            yield CLAIMS.format(task=NAMES[made["name"]])
            yield table(
                ["claim", "verdict", "the paper's numbers"],
                [[claim["text"], claim["verdict"], claim.get("paper") or ""] for claim in decided],
            )
        yield origin(runs[0], STUDY, runs[0]["threads"])
    yield from front_table.sections()


def figures() -> Iterator[tuple[str, Any]]:
    """Yield the command's own picture of every task, and the picture of 8-bit programs."""
    from lit_compress.analysis.pareto import costs_of, mean_costs, pareto_figure

    for made, runs in comparisons():
        each, dense = costs_of(runs)
        groups = []
        for key in dict.fromkeys((run["label"], run["asked"]) for run in runs):
            some = [number for number, run in enumerate(runs) if (run["label"], run["asked"]) == key]
            values = [runs[number]["compressed"]["metric"] for number in some]
            bar = stdev(values) if len(values) > 1 else standard_error(runs[some[0]]["compressed"]["interval"])
            costs = mean_costs([each[number] for number in some])
            groups.append({"label": key[0], "mean": mean(values), "bar": bar, "costs": costs})
        net = {"mean": mean(run["dense"]["metric"] for run in runs), "costs": dense}
        yield made["name"], pareto_figure(groups, net, f"dev {made['metric']['name']}", made["metric"]["mode"])
    yield "front", front_table.figure()


def facts() -> dict[str, str]:
    """Return steps and standard errors of the tasks in :func:`every_task`, in words."""
    tasks = complete()[0]
    made_of = [(NAMES[made["name"]], made, runs[0]["dense"]["interval"]) for made, runs in comparisons()]
    shown = [some for some in made_of if some[1]["name"] in tasks]
    return {
        "updates": ", ".join(f"{made['config']['updates']:,} training steps on {task}" for task, made, _ in shown),
        "errors": ", ".join(f"{percent((high - low) / 3.92)} ({task})" for task, _, (low, high) in shown),
        "others": ", ".join(task for task, made, _ in made_of if made["name"] not in tasks),
    }


def complete() -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return the largest table at density 0.10 in which every method has a run of every task.

    Returns:
        The runs of the first tasks of NAMES, by task, and the labels of the methods, best on the first task first.
    """
    runs_of = {
        made["name"]: [run for run in runs if run["asked"] == "density=0.1" and smaller(run)]
        for made, runs in comparisons()
    }
    tables = []
    for count in range(1, len(runs_of) + 1):
        first, *others = list(runs_of)[:count]
        run_everywhere = set.intersection(*({run["label"] for run in runs_of[task]} for task in (first, *others)))
        labels = dict.fromkeys(run["label"] for run in runs_of[first] if run["label"] in run_everywhere)
        tables.append(({task: runs_of[task] for task in (first, *others)}, list(labels)))
    return max(tables, key=lambda table: len(table[0]) * len(table[1]))


def every_task() -> str:
    """Return the table of :func:`complete`: dev metric in %."""
    tasks, labels = complete()
    rows = [["dense", *(percent(mean(run["dense"]["metric"] for run in runs)) for runs in tasks.values()), "1x", "1x"]]
    for label in labels:
        cells = [[run for run in runs if run["label"] == label] for runs in tasks.values()]  # one per seed
        first = cells[0][0]
        scores = [percent(mean(run["compressed"]["metric"] for run in runs)) for runs in cells]
        rows.append([label, *scores, f"{1 / first['ratios']['flops']:.1f}x", f"{first['ratios']['speedup']:.1f}x"])
    return table(["method, density 0.10", *(NAMES[task] for task in tasks), "fewer FLOPs", "speed-up"], rows)


front = front_table.short
