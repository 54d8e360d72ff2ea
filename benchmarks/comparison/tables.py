"""The tables of the comparisons and their pictures, from results/<task>.json and results/<task>/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from benchmarks.common import file_density, load, mean_and_deviation, origin, percent, table
from benchmarks.comparison import front_table
from benchmarks.comparison.front_table import NAMES, SCORES
from lit_compress.evaluation.intervals import standard_error
from lit_compress.export.report import of_program

STUDY = "comparison"
TITLE = "All methods by one command"
ABOUT = "`compare` on SST-2, STS-B and MRPC: one teacher trained to its end, as many steps for every method, one learning rate, the best epoch chosen on held-out rows."
TASKS = ("sst2", "stsb", "mrpc")
LONGER = "sst2_4000"  # some of the methods, trained longer
USUAL = 0.1  # the density of all methods
FIRST_SCREEN = 10  # rows

ALL = """## Every method at a tenth of the weights

MiniLM-L6-H384; {steps}; batches of 32, bf16-mixed, {seeds}. Dev metric
in %: accuracy, or the mean of Pearson's and Spearman's correlation on STS-B. *Mean*: of the tasks; *held out*: the same of the held-out rows. *Speed-up*: PyTorch on the CPU, one
text, one thread, median over the tasks, while the other cores were busy. *Bytes*: of the file, over the dense model's.
"""  # fmt: skip
STORED = "Single weights. Their zeros are stored: **the file is not smaller**.\n"
TWICE = """## Rows with {count} seeds on every task

Means over the seeds ± the standard deviation, with a teacher for each seed. The other methods have one seed.
"""
CLAIMS = """### Claims, decided with seed {seed}

"""
HEAD = """## {task}: a teacher of {epochs} epochs on all rows, {updates:,} steps after it

{fairness}
Learning rates: {rates}; seed {seed}. In %: {metric}, on the dev set ({rows:,} rows, a standard error {error}) / on the held-out
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
PICTURE = """![Pareto fronts on {task}](figures/{name}.png)

"""


def comparisons(*names: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield every comparison and its finished runs at a density, the best on the dev set first within a density.

    Runs with a budget of another kind are in the front table. ``names`` are those of TASKS without any.
    """
    found = {made["file"]: made for made in load(STUDY)}
    for name in names or TASKS:
        if name in found:
            runs = [of_its_program(run) for run in load(f"{STUDY}/{name}") if run["asked"].startswith("density=")]
            yield found[name], sorted(runs, key=lambda run: (-_asked(run), -run["compressed"]["metric"]))


def of_its_program(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run as :func:`of_program`; the held-out rows were scored before there was a program."""
    small = of_program(run)
    return run if small is run else small | {"held_out": None}


def _times(gain: float | None) -> str:
    return "" if gain is None else f"{gain:.2f}x"


def _asked(run: dict[str, Any]) -> float:
    return float(run["asked"].removeprefix("density="))


def _held_out(runs: list[dict[str, Any]]) -> str:
    """Return the cell of the held-out rows: the mean over runs, or nothing if one was not scored on them."""
    found = [run["held_out"][f"val/{run['metric']['name']}"] for run in runs if run["held_out"]]
    return percent(mean(found)) if len(found) == len(runs) else ""


def smaller(run: dict[str, Any]) -> bool:
    """Return whether a run's file is smaller than the dense one: single weights that are zero are stored."""
    return bool(run["ratios"]["bytes"] < 0.99)


def _table(runs: list[dict[str, Any]]) -> str:
    return table(COLUMNS, [
        [
            f"{_asked(run):g}", run["label"], f"{file_density(run):.3f}", percent(run["compressed"]["metric"]),
            _held_out([run]), percent(run["compressed"]["metric"] / run["dense"]["metric"]),
            _times(1 / run["ratios"]["flops"]), _times(run["ratios"]["speedup"]), f"{run['ratios']['bytes']:.3f}",
            f"{sum(record['steps'] for record in run['records'][1:]):,}", f"{run['seconds'] / 60:.0f}",
        ]
        for run in runs
    ])  # fmt: skip


SHOWN = [NAMES[task] for task in TASKS]
Row = dict[str, list[dict[str, Any]]]  # task -> runs, one per seed, in their order


def rows_of(seeds: int) -> dict[str, Row]:
    """Return the rows that every task has with the first ``seeds`` seeds, by name, the best mean first."""
    made: dict[str, Row] = {}
    for comparison, runs in comparisons():
        chosen = sorted({run["seed"] for run in runs})[:seeds]
        for run in sorted(runs, key=lambda run: run["seed"]):
            name = run["label"] + (f" at {_asked(run):g}" if _asked(run) != USUAL else "")
            if run["seed"] in chosen:
                made.setdefault(name, {}).setdefault(comparison["name"], []).append(run)
    whole = {name: row for name, row in made.items() if all(len(row.get(task, [])) == seeds for task in TASKS)}
    return dict(sorted(whole.items(), key=lambda item: -mean(scores(item[1]))))


def scores(row: Row, net: str = "compressed") -> list[float]:
    """Return the dev metric of every task, means over the seeds."""
    return [mean(run[net]["metric"] for run in row[task]) for task in TASKS]


def _dense(row: Row) -> list[str]:
    """Return the cells of the dense model: those of a row's teachers."""
    values = scores(row, "dense")
    made = [each["teachers_held_out"][0][f"val/{each['metric']['name']}"] for each, _ in comparisons()]
    return ["dense", *map(percent, (*values, mean(values))), "100.0", percent(mean(made)), "1x", "1"]


def _cells(name: str, row: Row) -> list[str]:
    """Return the cells of a row of one seed."""
    runs, values = [row[task][0] for task in TASKS], scores(row)
    return [
        name, *map(percent, (*values, mean(values), mean(values) / mean(scores(row, "dense")))),
        _held_out(runs),
        _times(median(run["ratios"]["speedup"] for run in runs)),
        f"{mean(run['ratios']['bytes'] for run in runs):.2f}",
    ]  # fmt: skip


def _parts() -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the rows of one seed: those with smaller files, and the others."""
    rows = rows_of(1)
    small = {name: row for name, row in rows.items() if smaller(row[TASKS[0]][0])}
    return small, {name: row for name, row in rows.items() if name not in small}


SHORT = [*SHOWN, "mean", "of dense", "held out", "speed-up", "bytes"]


def every_task(count: int = FIRST_SCREEN) -> str:
    """Return the best rows whose file is smaller, with one seed."""
    small, _ = _parts()
    rows = [_dense(next(iter(small.values()))), *(_cells(name, row) for name, row in list(small.items())[:count])]
    return table(["method, density 0.10", *SHORT], rows)


def facts() -> dict[str, str]:
    """Return steps, seeds, standard errors and the number of rows of :func:`every_task`, in words."""
    made = list(comparisons())
    errors = {NAMES[each["name"]]: runs[0]["dense"]["interval"] for each, runs in made}
    tasks: dict[int, list[str]] = {}
    for each, _ in made:
        tasks.setdefault(each["config"]["updates"], []).append(NAMES[each["name"]])
    steps = ", ".join(f"{updates:,} on {' and '.join(names)}" for updates, names in tasks.items())
    return {
        "steps": f"training steps after the teacher: {steps}",
        "errors": ", ".join(f"{percent((high - low) / 3.92)} ({task})" for task, (low, high) in errors.items()),
        "rows": str(len(_parts()[0])),
        "machine": made[0][0]["hardware"]["accelerator"] or made[0][0]["hardware"]["cpu"],
    }


def _all() -> Iterator[str]:
    """Yield the tables of all tasks: every row with one seed, the rows with more, and the claims."""
    small, rest = _parts()
    yield ALL.format(seeds="seed 1", **facts())
    yield every_task(len(small))
    yield STORED
    yield table(["method, density 0.10", *SHORT], [_cells(name, row) for name, row in rest.items()])
    first = next(comparisons())[1][0]
    yield origin(first, STUDY, first["threads"])
    count = max(len({run["seed"] for run in runs}) for _, runs in comparisons())
    if count > 1 and (twice := rows_of(count)):
        yield TWICE.format(count=count)
        body = [["dense", *_means(next(iter(twice.values())), "dense")]]
        body += [[name, *_means(row, "compressed")] for name, row in twice.items()]
        yield table(["method, density 0.10", *SHOWN, "mean"], body)
    verdicts: dict[str, dict[str, str]] = {}
    papers: dict[str, str] = {}
    for made, _ in comparisons():
        for claim in made["claims"]:
            if claim["verdict"] != "not measured":
                verdicts.setdefault(claim["text"], {})[made["name"]] = claim["verdict"]
                papers[claim["text"]] = claim.get("paper") or ""
    yield CLAIMS.format(seed=first["seed"])
    yield table(
        ["claim", *SHOWN, "the paper's numbers"],
        [[text, *(found.get(task, "") for task in TASKS), papers[text]] for text, found in verdicts.items()],
    )


def _means(row: Row, net: str) -> list[str]:
    """Return mean and standard deviation over the seeds of every task, and of the mean of the tasks."""
    each = [[run[net]["metric"] for run in row[task]] for task in TASKS]
    return [mean_and_deviation(values) for values in (*each, [mean(seed) for seed in zip(*each, strict=True)])]


def _one(made: dict[str, Any], runs: list[dict[str, Any]], name: str) -> Iterator[str]:
    """Yield the table of one comparison's first seed, and its picture if it is of the shipped one."""
    dense, config = runs[0]["dense"], made["config"]
    (low, high), score = dense["interval"], f"val/{made['metric']['name']}"
    yield HEAD.format(
        task=NAMES[made["name"]], epochs=config["teacher"]["model.dense.epochs"], fairness=made["fairness"],
        updates=config["updates"], rates=", ".join(f"{float(rate):g}" for rate in config["learning_rates"]),
        seed=runs[0]["seed"], rows=made["metric"]["rows"], metric=SCORES[made["metric"]["name"]],
        error=percent((high - low) / 3.92),
        dense=f"{percent(dense['metric'])} / {percent(made['teachers_held_out'][0][score])}",
    )  # fmt: skip
    yield _table(runs)
    if any(run["ratios"]["speedup"] is None for run in runs):
        yield PROGRAMS
    if name in TASKS:
        yield PICTURE.format(task=NAMES[name], name=name)
    yield origin(runs[0], STUDY, runs[0]["threads"])


def first_seed(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of the first seed."""
    return [run for run in runs if run["seed"] == min(run["seed"] for run in runs)]


def sections() -> Iterator[str]:
    """Yield the tables of all tasks, of 8-bit programs, and of every task."""
    yield from _all()
    yield from front_table.sections()
    for name in (*TASKS, LONGER):
        for made, runs in comparisons(name):
            yield from _one(made, first_seed(runs), name)


def figures() -> Iterator[tuple[str, Any]]:
    """Yield the command's own picture of every task, and the picture of 8-bit programs."""
    from lit_compress.analysis.pareto import costs_of, mean_costs, pareto_figure

    for made, several in comparisons():
        runs = first_seed(several)
        each, dense = costs_of(runs)
        groups = [
            {
                "label": run["label"], "mean": run["compressed"]["metric"], "costs": mean_costs([costs]),
                "bar": standard_error(run["compressed"]["interval"]),
            }
            for run, costs in zip(runs, each, strict=True)
        ]  # fmt: skip
        net = {"mean": runs[0]["dense"]["metric"], "costs": dense}
        yield made["name"], pareto_figure(groups, net, f"dev {made['metric']['name']}", made["metric"]["mode"])
    yield "front", front_table.figure()


front = front_table.short
