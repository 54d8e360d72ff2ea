"""The tables and figures of FWSVD's claims, from results/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import load, mean_and_deviation, origin, percent, spread, table, updates

STUDY = "fwsvd"
TITLE = "FWSVD next to SVD"
ABOUT = "Fisher-weighted SVD on four tasks: weightings and ratios of ranks, grouped truncation, retraining; the Fisher pass and single decompositions in time."

TASKS = {"sst2": "SST-2", "mrpc": "MRPC", "cola": "CoLA", "stsb": "STS-B"}
KEYS = {"sst2": "val/accuracy", "mrpc": "val/f1", "cola": "val/matthews", "stsb": "val/pearson_spearman"}
LABELS = {
    "none": "SVD",
    "fisher-in": "in (FWSVD)",
    "fisher-out": "out",
    "fisher-both": "both",
}
# Table 1 of the paper, BERT-base at 33 %: dense, SVD, SVD + fine-tuning, FWSVD, FWSVD + fine-tuning
PAPER = {
    "sst2": (93.0, 76.7, 90.9, 82.1, 91.2), "mrpc": (87.4, 61.4, 84.1, 81.2, 88.0),
    "cola": (56.2, 2.7, 40.5, 13.5, 49.4), "stsb": (88.5, 26.8, 85.7, 68.6, 87.0),
}  # fmt: skip
# Table 4 of the paper, BERT-base on STS-B: drop in % when a group is removed
PAPER_DROPS = {
    "none": (25.4, 6.7, 2.8, 2.2, 1.1, 0.9, 0.7, 0.4, 0.1, 4.9),
    "fisher-in": (24.1, 6.1, 2.7, 1.5, 0.8, 0.6, 0.2, 0.3, 0.2, 0.2),
}

SWEEP = """## FWSVD without retraining: weightings x ratio of ranks kept

Dev metric in % (SST-2, MRPC accuracy; CoLA Matthews; STS-B mean of both correlations) of MiniLM-L6-H384 fine-tuned on
each task, right after the factorization. `in` is the paper's axis. The last row is the dense model. ![figure](figures/sweep-sst2.png)
"""
RETRAIN = """## FWSVD with retraining at 33 % of the ranks

Mean and standard deviation over 3 seeds (order of the data, dropout and the drawn subset; one dense model), with the same
steps and learning rate. MRPC is F1, as in the paper. The paper's columns: BERT-base, full training data, one run.
"""
DROPS = """## Grouped rank truncation (the paper's Figure 1, Table 4)

Points of the dev metric lost when the g-th tenth of the components of all matrices is removed, largest singular values
first, no retraining; `error`: mean Frobenius norm of the removed part. ![figure](figures/truncation-stsb.png)
"""


def by_name() -> dict[str, dict[str, Any]]:
    """Return every result by the name of its file."""
    return {result["file"]: result for result in load(STUDY)}


def sweep(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield one table per task: ratios x weightings."""
    for task, title in TASKS.items():
        if f"sweep-{task}" not in results:
            continue
        rows = results[f"sweep-{task}"]["rows"]
        cells = {(r["weighting"], r["rank_ratio"]): r for r in rows}
        ratios = sorted({r["rank_ratio"] for r in rows})
        labels = [label for label in LABELS if any(w == label for w, _ in cells)]
        body = []
        for ratio in ratios:
            found = [cells.get((label, ratio)) for label in labels]
            best = max(c["metric"] for c in found if c)
            shown = ["" if c is None else percent(c["metric"]) for c in found]
            shown = [f"**{text}**" if text == percent(best) else text for text in shown]
            body.append([f"{ratio:.1f}", f"{cells['none', ratio]['density']:.2f}", *shown])
        yield f"**{title}**\n"
        yield table(["ratio of ranks", "density", *(LABELS[label] for label in labels)], body)


def retrain(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield one table: tasks x weightings, before and after retraining."""
    rows = []
    for task, title in TASKS.items():
        runs = {
            kind: [r for name, r in results.items() if name.startswith(f"retrain-{task}-{kind}-")]
            for kind in ("none-in", "fisher-in")
        }
        if not all(runs.values()):
            continue
        key = KEYS[task]
        records = {kind: [{s["name"]: s for s in r["records"]} for r in group] for kind, group in runs.items()}
        dense = records["none-in"][0]["dense"]["metric"][key]
        density = runs["none-in"][0]["compressed"]["density"]
        cells = [
            mean_and_deviation([record["retrain"][when][key] for record in group])
            for group in records.values()
            for when in ("initial", "metric")
        ]
        paper = PAPER[task]
        made = sorted({updates(r) for group in runs.values() for r in group})
        published = [" / ".join(map(str, paper[1:3])), " / ".join(map(str, paper[3:]))]
        rows.append([title, f"{density:.2f}", ", ".join(map(str, made)), percent(dense), *cells, *published])
    header = ["task", "density", "steps after the teacher", "dense", "SVD before", "SVD after", "FWSVD before",
              "FWSVD after", "paper SVD", "paper FWSVD"]  # fmt: skip
    yield table(header, rows)


def drops(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield one table per task: removed groups x weightings."""
    for task, title in TASKS.items():
        if f"truncation-{task}" not in results:
            continue
        rows = results[f"truncation-{task}"]["rows"]
        cells = {(r["weighting"], int(r["group"])): r for r in rows}
        labels = [label for label in LABELS if (label, 1) in cells]
        body = []
        for group in range(1, 11):
            line = [str(group), *(f"{100 * cells[label, group]['drop']:.1f}" for label in labels)]
            line += [f"{cells[label, group]['error']:.2f}" for label in ("none", "fisher-in")]
            if task == "stsb":
                line += [str(PAPER_DROPS[label][group - 1]) for label in PAPER_DROPS]
            body.append(line)
        header = ["group", *(LABELS[label] for label in labels), "error SVD", "error in"]
        yield f"**{title}**\n"
        yield table(header + (["paper SVD, %", "paper FWSVD, %"] if task == "stsb" else []), body)


def figures() -> Iterator[tuple[str, Any]]:
    """Yield name and figure of every analysis."""
    from benchmarks.analysis.plots import FIGURES

    results = by_name()
    for name, result in results.items():
        part, _, task = name.partition("-")
        if part in ("sweep", "truncation"):
            figure = FIGURES[part](result["rows"])
            figure.suptitle(TASKS[task])
            yield name, figure


def speed() -> Iterator[str]:
    """Yield time and memory of the Fisher pass and of single decompositions, each next to its goal."""
    passes = load("fwsvd/fisher")
    if passes:
        yield "## Time and memory of the Fisher pass\n"
        rows = []
        for result in passes:
            setting = result["setting"]
            where = f"{result['name'].partition('-')[2]}, {setting['batch']} x {setting['length']} tokens"
            where += f", {setting['device']}, {setting['threads']} thread(s)"
            if "mib" in result:
                rows.append([where, "memory / step", f"{result['ratio']:.2f}", f"{result['goals']['memory']:g}"])
                continue
            for what, ratio in result["ratio"].items():
                rows.append([where, what, spread(ratio), f"{result['goals'][what]:g}"])
        yield table(["shape", "what", "ratio", "goal"], rows)
        yield (
            "A `step` is forward, loss and backward of plain training with all weight gradients, a `loop` does one "
            "backward per example. Goals: at most 1.2, at least 5, at most 1.2.\n"
        )
    for result in load("fwsvd/decompose"):
        threads = result["setting"]["threads"]
        for what, found in result["result"].items():
            yield f"- {result['name']}, weighting {what}: {found['total'][0]:.1f} s, {threads} thread(s)."
    yield ""


def sections() -> list[str]:
    """Return the sections of the page; [] without results."""
    results = by_name()
    if not results:
        return []
    lines = [SWEEP, *sweep(results), RETRAIN, *retrain(results), DROPS, *drops(results)]
    return [*lines, origin(next(iter(results.values())), STUDY, 1), *speed()]
