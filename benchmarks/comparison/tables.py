"""The tables of the comparisons and their pictures, from results/<task>.json and results/<task>/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.common import file_density, load, mean_and_deviation, origin, percent, table
from benchmarks.comparison import curve, front_table
from benchmarks.comparison.claims import FILE, Claim, read_claims
from benchmarks.comparison.curve import USUAL, asked
from benchmarks.comparison.front_table import NAMES, SCORES
from benchmarks.gains import costs_of, middle, with_gains
from lit_compress.evaluation.intervals import standard_error
from lit_compress.export.report import of_program
from lit_compress.utils.files import read_yaml

STUDY = "comparison"
TITLE = "All methods by one command"
ABOUT = "`compare` on SST-2, STS-B and MRPC: one teacher trained to its end, as many steps for every method, one learning rate, the best epoch chosen on held-out rows."
TASKS = ("sst2", "stsb", "mrpc")
LONGER = "sst2_4000"  # some of the methods, trained longer
AGAIN = tuple(f"{task}_again" for task in TASKS)  # methods that stored another density before
FIRST_SCREEN = 10  # rows
EARLIER = (
    "CoFiLoSparse",
    "ITP",
    "LoSparse",
    "Movement",
    "SecondOrder",
)  # of a version that did not store the density asked for

ALL = """## Every method at a tenth of the weights

MiniLM-L6-H384; {steps}; batches of 32, bf16-mixed. Dev metric in %: accuracy,
or the mean of Pearson's and Spearman's correlation on STS-B. Means over {seeds} seeds ± their standard deviation; every seed has a teacher of its own.
*Mean*: of the tasks; *held out*: the same of the held-out rows. *Speed-up*: PyTorch on the CPU, one
text, one thread, median over all runs, while the other cores were busy; models of equal shapes share their times. ≈: too noisy for a second
decimal. *Bytes*: of the file, over the dense model's. *Stored*: the density of the files, if it is more than 1 % off 0.10.
"""
STORED = "Single weights. Their zeros are stored: **the file is not smaller**.\n"
CLAIMS = """### Claims, decided with {seeds} seeds

A paired t-test over the seeds, corrected for all claims of a task. With {seeds} seeds it asks for much: a difference has to be about ten times
its spread. *Ahead*: of the {pairs} pairs of runs with one task and seed, those in which the first method is ahead of the second, and the mean difference in points.
The seeds of a task share its dev set, so the pairs are not independent, and no probability is given for their number.
"""
HEAD = """## {task}: a teacher of {epochs} epochs on all rows, {updates:,} steps after it

{fairness}
Learning rates: {rates}. In %: {metric}, means over the seeds, on the dev set ({rows:,} rows, a standard error {error}) / on the held-out
rows; the dense models have {dense}. Of dense: dev, the same seed's teacher. Steps and minutes: all stages after the teacher, on a shared machine.
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
    "seeds",
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
            runs = with_gains(runs)
            yield found[name], sorted(runs, key=lambda run: (-asked(run), -run["compressed"]["metric"]))


def of_its_program(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run as :func:`of_program`; the held-out rows were scored before there was a program."""
    small = of_program(run)
    return run if small is run else small | {"held_out": None}


def _held_out(runs: list[dict[str, Any]]) -> str:
    """Return the cell of the held-out rows: the mean over runs, or nothing if one was not scored on them."""
    found = [run["held_out"][f"val/{run['metric']['name']}"] for run in runs if run["held_out"]]
    return percent(mean(found)) if len(found) == len(runs) else ""


def smaller(run: dict[str, Any]) -> bool:
    """Return whether a run's file is smaller than the dense one: single weights that are zero are stored."""
    return bool(run["ratios"]["bytes"] < 0.99)


def grouped(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the runs of every density and method, which differ in their seed; the best mean first at a density."""
    found: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((asked(run), run["label"]), []).append(run)
    return sorted(found.values(), key=lambda group: (-asked(group[0]), -_mean(group, "compressed", "metric")))


def _mean(runs: list[dict[str, Any]], *keys: str) -> float:
    """Return the mean of a number of every run."""
    values = []
    for run in runs:
        value: Any = run
        for key in keys:
            value = value[key]
        values.append(value)
    return mean(values)


def _speedup(runs: list[dict[str, Any]]) -> str:
    """Return the cell of the speed-up: the median; nothing if a run was not timed."""
    return middle([run["gain"] for run in runs])


def _table(runs: list[dict[str, Any]]) -> str:
    return table(COLUMNS, [
        [
            f"{asked(group[0]):g}", shown(group[0]["label"], group), f"{mean(map(file_density, group)):.3f}",
            percent(_mean(group, "compressed", "metric")), _held_out(group),
            percent(_mean(group, "compressed", "metric") / _mean(group, "dense", "metric")),
            f"{1 / _mean(group, 'ratios', 'flops'):.2f}x", _speedup(group), f"{_mean(group, 'ratios', 'bytes'):.3f}",
            f"{sum(record['steps'] for record in group[0]['records'][1:]):,}", f"{_mean(group, 'seconds') / 60:.0f}",
            str(len(group)),
        ]
        for group in grouped(runs)
    ])  # fmt: skip


SHOWN = [NAMES[task] for task in TASKS]
Row = dict[str, list[dict[str, Any]]]  # task -> runs, one per seed, in their order


def seeds_of(runs: list[dict[str, Any]]) -> set[int]:
    """Return the seeds of some runs."""
    return {run["seed"] for run in runs}


def rows_of() -> dict[str, Row]:
    """Return the rows that every task has with all seeds, by name, the best mean first."""
    made: dict[str, Row] = {}
    seeds = {}
    for comparison, runs in comparisons():
        seeds[comparison["name"]] = seeds_of(runs)
        for run in sorted(runs, key=lambda run: run["seed"]):
            name = run["label"] + (f" at {asked(run):g}" if asked(run) != USUAL else "")
            made.setdefault(name, {}).setdefault(comparison["name"], []).append(run)
    whole = {
        name: row for name, row in made.items() if all(seeds_of(row.get(task, [])) == seeds[task] for task in TASKS)
    }
    return dict(sorted(whole.items(), key=lambda item: -mean(scores(item[1]))))


def scores(row: Row, net: str = "compressed") -> list[float]:
    """Return the dev metric of every task, means over the seeds."""
    return [_mean(row[task], net, "metric") for task in TASKS]


def shown(name: str, runs: list[dict[str, Any]]) -> str:
    """Return the name of a row; with the stored density if that is not the one asked for, and why."""
    found, wanted = mean(map(file_density, runs)), asked(runs[0])
    whole_blocks = runs[0]["method"] == "Layers"  # they have densities of their own
    if whole_blocks or abs(found / wanted - 1) <= 0.01:
        return name
    return f"{name} (stored {found:.3f}{', of an earlier version' * (runs[0]['method'] in EARLIER)})"


def _dense(row: Row) -> list[str]:
    """Return the cells of the dense models: those of a row's teachers."""
    made = [
        mean(held_out[f"val/{each['metric']['name']}"] for held_out in each["teachers_held_out"])
        for each, _ in comparisons()
    ]
    return ["dense", *_means(row, "dense"), "100.0", percent(mean(made)), "1x", "1"]


def _cells(name: str, row: Row) -> list[str]:
    """Return the cells of a row."""
    runs = [run for task in TASKS for run in row[task]]
    return [
        shown(name, runs), *_means(row, "compressed"), percent(mean(scores(row)) / mean(scores(row, "dense"))), _held_out(runs),
        _speedup(runs), f"{_mean(runs, 'ratios', 'bytes'):.2f}",
    ]  # fmt: skip


def _means(row: Row, net: str) -> list[str]:
    """Return mean and standard deviation over the seeds of every task, and of the mean of the tasks."""
    each = [[run[net]["metric"] for run in row[task]] for task in TASKS]
    return [mean_and_deviation(values) for values in (*each, [mean(seed) for seed in zip(*each, strict=True)])]


def _parts() -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the rows: those with smaller files, and the others."""
    rows = rows_of()
    small = {name: row for name, row in rows.items() if smaller(row[TASKS[0]][0])}
    return small, {name: row for name, row in rows.items() if name not in small}


SHORT = [*SHOWN, "mean", "of dense", "held out", "speed-up", "bytes"]


def every_task(count: int = FIRST_SCREEN) -> str:
    """Return the best rows whose file is smaller."""
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
        "seeds": str(len(seeds_of(made[0][1]))),
        "machine": _accelerators() or made[0][0]["hardware"]["cpu"],
    }


def _accelerators() -> str | None:
    """Return the names of all accelerators that made runs; None without any."""
    found = {run["hardware"]["accelerator"] for _, runs in comparisons() for run in runs} - {None}
    return " and ".join(sorted(found)) or None


def _all() -> Iterator[str]:
    """Yield the tables of all tasks: the rows of all seeds, the claims, and the curves."""
    small, rest = _parts()
    yield ALL.format(**facts())
    yield every_task(len(small))
    yield STORED
    yield table(["method, density 0.10", *SHORT], [_cells(name, row) for name, row in rest.items()])
    first = next(comparisons())[1][0]
    machines = {"hardware": first["hardware"] | {"accelerator": _accelerators()}}
    yield origin(first | machines, STUDY, first["threads"])
    yield from _claims()
    yield from curve.section({made["name"]: runs for made, runs in comparisons()})


def _claims() -> Iterator[str]:
    """Yield the table of the claims: the verdict on every task, and how often the first method is ahead."""
    verdicts: dict[str, dict[str, str]] = {}
    papers: dict[str, str] = {}
    for made, _ in comparisons():
        for claim in made["claims"]:
            if claim["verdict"] != "not measured":
                verdicts.setdefault(claim["text"], {})[made["name"]] = claim["verdict"]
                papers[claim["text"]] = claim.get("paper") or ""
    pairs = sum(len(seeds_of(runs)) for _, runs in comparisons())
    yield CLAIMS.format(seeds=facts()["seeds"], pairs=pairs)
    claims = read_claims(read_yaml("claims", FILE))
    rows, known = rows_of(), {claim.text: claim for claim in claims}
    yield table(
        ["claim", *SHOWN, "ahead", "the paper's numbers"],
        [
            [text, *(found.get(task, "") for task in TASKS), _ahead(known[text], rows), papers[text]]
            for text, found in verdicts.items()
        ],
    )


def _ahead(claim: Claim, rows: dict[str, Row]) -> str:
    """Return for every pair of a claim in how many runs its first method is ahead, and the mean difference in points.

    Nothing is returned for a claim on another value than the metric, or with a factor or a distance, or without rows.
    """
    named = {label for pair in claim.pairs for label in pair}
    if (claim.value, claim.times, claim.by) != ("metric", 1.0, 0.0) or not named <= rows.keys():
        return ""
    shown = []
    for above, below in claim.pairs:
        gaps = [
            one["compressed"]["metric"] - other["compressed"]["metric"]
            for task in TASKS
            for one, other in zip(rows[above][task], rows[below][task], strict=True)
        ]
        shown.append(f"{sum(gap > 0 for gap in gaps)}, {100 * mean(gaps):+.1f}")
    return "; ".join(shown)


def _one(made: dict[str, Any], runs: list[dict[str, Any]], name: str) -> Iterator[str]:
    """Yield the table of one comparison; its picture if it is of the shipped one, else its machine."""
    config, score = made["config"], f"val/{made['metric']['name']}"
    low, high = runs[0]["dense"]["interval"]
    held_out = mean(found[score] for found in made["teachers_held_out"])
    yield HEAD.format(
        task=NAMES[made["name"]] + ", made again" * (name in AGAIN), epochs=config["teacher"]["model.dense.epochs"], fairness=made["fairness"],
        updates=config["updates"], rates=", ".join(f"{float(rate):g}" for rate in config["learning_rates"]),
        rows=made["metric"]["rows"], metric=SCORES[made["metric"]["name"]], error=percent((high - low) / 3.92),
        dense=f"{percent(mean(_teachers(runs).values()))} / {percent(held_out)}",
    )  # fmt: skip
    yield _table(runs)
    if any(run["ratios"]["speedup"] is None for run in runs):
        yield PROGRAMS
    yield PICTURE.format(task=NAMES[name], name=name) if name in TASKS else origin(runs[0], STUDY, runs[0]["threads"])


def _teachers(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Return the dev metric of every seed's teacher."""
    return {run["seed"]: run["dense"]["metric"] for run in runs}


def sections() -> Iterator[str]:
    """Yield the tables of all tasks, of 8-bit programs, and of every task."""
    yield from _all()
    yield from front_table.sections()
    for name in (*TASKS, LONGER, *AGAIN):
        for made, runs in comparisons(name):
            yield from _one(made, runs, name)


def figures() -> Iterator[tuple[str, Any]]:
    """Yield the command's own picture of every task, and the picture of 8-bit programs."""
    from lit_compress.run.pictures import pareto_figure
    from lit_compress.run.results import mean_costs

    for made, runs in comparisons():
        several = grouped(runs)
        costs, dense = costs_of([run for group in several for run in group])
        each = iter(costs)
        groups = [
            {
                "label": group[0]["label"], "mean": _mean(group, "compressed", "metric"),
                "costs": mean_costs([next(each) for _ in group]),
                "bar": mean(standard_error(run["compressed"]["interval"]) for run in group),
            }
            for group in several
        ]  # fmt: skip
        net = {"mean": mean(_teachers(runs).values()), "costs": dense}
        yield made["name"], pareto_figure(groups, net, f"dev {made['metric']['name']}", made["metric"]["mode"])
    yield "curve", curve.figure({made["name"]: runs for made, runs in comparisons()})
    yield "front", front_table.figure()


front = front_table.short
