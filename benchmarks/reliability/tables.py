"""The tables of kills, faults, damaged files, several processes and memory, from results/*/*.json."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.common import load, origin, table

TITLE = "Kills, faults, damaged files, several processes, memory"
ABOUT = "Runs of 15 methods killed at random moments and continued; a fault at every write of a command; damaged files; several processes next to one; memory over steps and data; comparisons under kills."

GROUPS = ("records", "net", "checkpoint", "export", "mid-epoch", "mid-accumulation", "calibration", "evaluation")

KILLS = """## Kills

Models of two blocks and width 32, two batches to a step, a checkpoint every second step, all stages. A point is an event of the
run: a file that is opened, written, renamed or removed, a step, a batch. The process gets SIGKILL right before it, of `torn`
with the file at hand half written, and the same command with `--ckpt_path last` goes on. `wrong`: points after which a model, the
export or a metric differs by a bit from the unbroken run's, or a file is left. `records`: the JSON files of a run, its folders.
"""

FAULTS = """## A fault at every write

Every file that a command opens, writes, renames, makes or removes meets an error (no space, read-only, I/O, in turn), where it is
written also a disk that is full in its middle, and a kill, half written where that can be. `one line`: exit code 2 and one line;
`in spite`: it ended well, as nothing needed the file. `wrong`: a traceback, something unreadable, or another end than the unbroken
one after the same command was given again.
"""

FUZZ = """## Damaged files

Configurations with random keys, types and nesting; data files, whole ones and mutations of them; exports and models with flipped
bits, cut short, with wrong shapes, sizes that would fill the memory, and pickles that run code. Each in a process of its own, with
a limit of memory and time. `one line`: refused as a user's mistake is; `read`: what was damaged does not matter, or cannot be seen;
`findings`: a traceback, code that ran, a hang, or memory beyond the limit.
"""

AGREEMENT = """## Several processes next to one

A run on 2 and 4 processes, next to the run on one with the same global batches: 44 training rows in batches of 8, 23 dev rows, 3
epochs. `weights`: norm of the difference of all weights of a stage's model over their norm, the largest over both strategies and
both numbers; `kept`: the same of what the method keeps next to the model (scores, gates, multipliers); `removed`: whether the models
have the same ranks, heads, neurons and layers, and in how many zeros they differ; `metric`: the largest difference of the dev
metric, 0.0435 is one row. `noise`: the same as `weights` of three runs on one process whose first weights differ by 1e-7 of their
values; where it is empty it was not measured.
"""

MEMORY = """## Memory

Resident memory without mapped files, in MiB, at step 100 and at the last of a stage's steps; and the peak, mapped files included,
of a whole run on so many rows and on ten times as many (read, tokenised, 100 steps, export). The package itself is most of it.
"""


def kills() -> str:
    """Return the table of kills; [] groups are of no point."""
    rows, total = list[list[str]](), Counter[str]()
    results = load("reliability/kills")
    for result in results:
        points = result["points"]
        count = Counter(point["group"] for point in points)
        found = Counter(
            torn=sum(p["torn"] for p in points), wrong=sum(bool(p["wrong"]) for p in points), kills=len(points)
        )
        total += count + found
        rows.append([result["name"], *_counts({**count, **found})])
    rows.append(["**all**", *_counts(total)])
    return table(["method", "kills", *GROUPS, "torn", "wrong"], rows)


def _counts(found: dict[str, int]) -> list[str]:
    return [str(found.get(name, 0)) for name in ("kills", *GROUPS, "torn", "wrong")]


def faults() -> str:
    """Return the table of faults."""
    rows = []
    for result in load("reliability/faults"):
        points = result["points"]
        kind = Counter(
            "kill" if p["fault"] in ("kill", "torn") else "short" if p["fault"] == "half" else "error" for p in points
        )
        codes = Counter(point["code"] for point in points)
        wrong = sum(bool(point["wrong"]) for point in points)
        shown = (
            f"{len(points)} of {result['of']}",
            kind["error"],
            kind["short"],
            kind["kill"],
            codes[2],
            codes[0],
            wrong,
        )
        rows.append([f"`{result['name']}`", *map(str, shown)])
    return table(["command", "faults", "errors", "full in the middle", "kills", "one line", "in spite", "wrong"], rows)


def fuzz() -> str:
    """Return the table of damaged files."""
    rows = [
        [
            r["name"],
            *(f"{r[key]:,}" for key in ("cases", "refused", "read")),
            str(len(r["findings"])),
            f"{r['most_mib']:,}",
        ]
        for r in load("reliability/fuzz")
    ]
    return table(["of", "cases", "one line", "read", "findings", "most memory, MiB"], rows)


def agreement() -> str:
    """Return the table of several processes."""
    rows = []
    for result in load("reliability/agreement"):
        for stage in dict.fromkeys(row["stage"] for row in result["rows"]):
            every = [row for row in result["rows"] if row["stage"] == stage]
            found = [row for row in every if row["processes"] > 1]
            noise = [row["weights"] for row in every if row["processes"] == 1]
            kept = [row["beside"] for row in found if row["beside_names"]]
            same = all(row["structure"] and row["steps"] for row in found)
            zeros = max(-1 if row["zeros"] is None else row["zeros"] for row in found)
            rows.append([
                f"{result['name']} {stage}", _power([row["weights"] for row in found]), _power(kept) if kept else "",
                f"the same, {zeros} of {found[0]['numbers']:,}" if same else "other rows",
                f"{max(abs(value) for row in found for value in row['metrics'].values()):.4f}",
                _power(noise) if noise else "",
            ])  # fmt: skip
    return table(["stage", "weights", "kept", "removed, zeros", "metric", "noise"], rows)


def _power(values: list[float | None]) -> str:
    """Return the largest distance as a power of ten."""
    found = [value for value in values if value is not None]
    return "other rows" if len(found) < len(values) else f"{max(found):.0e}"


def memory() -> list[str]:
    """Return the tables of memory."""
    found = {result["name"]: result for result in load("reliability/memory")}
    steps = [
        [
            run["method"],
            str(run["samples"][-1]["step"]),
            _mib(first := at(run, 100)),
            _mib(last := run["samples"][-1]["own"]),
            f"{last - first:+.1f}",
        ]
        for run in found["steps"]["runs"]
    ]
    small, large = found["data"]["runs"]
    data = [[f"{run['rows']:,}", _mib(run["peak"])] for run in (small, large)]
    return [
        MEMORY,
        table(["method", "steps", "at step 100", "at the last step", "more"], steps),
        table(["training rows", "peak"], data),
        f"Ten times the data: {100 * (large['peak'] / small['peak'] - 1):+.1f} % of the peak.\n",
    ]


def at(run: dict[str, Any], step: int) -> float:
    """Return the memory at a step."""
    return next(sample["own"] for sample in run["samples"] if sample["step"] == step)


def _mib(value: float) -> str:
    return f"{value:.1f}"


def compared() -> list[str]:
    """Return what is said of comparisons under kills."""
    found = []
    for result in load("reliability/compare_under_kills"):
        ended = result["comparisons"]
        count = Counter[str]()
        for one in ended:
            count.update(one["killed"])
        wrong = sum(bool(one["wrong"]) for one in ended)
        found += [
            "## Comparisons under kills\n",
            f"{result['minutes']:.1f} minutes, {len(ended)} comparisons of {result['runs']} runs each. Killed at random moments: {count['worker']} times the worker, "
            f"{count['run']} times one of its runs, {count['all']} times all. {len(ended) - wrong} of {len(ended)} ended with the page of an unbroken comparison.\n",
        ]
    return found


def proven() -> str:
    """Return the list on docs/how_to/devices_and_resume.md."""
    points = [point for result in load("reliability/kills") for point in result["points"]]
    methods, wrong = len(load("reliability/kills")), sum(bool(point["wrong"]) for point in points)
    met = [point for result in load("reliability/faults") for point in result["points"]]
    found = {result["name"]: result for result in load("reliability/memory")}
    more = [run["samples"][-1]["own"] - at(run, 100) for run in found["steps"]["runs"]]
    small, large = (run["peak"] for run in found["data"]["runs"])
    compared = [result for result in load("reliability/compare_under_kills")]
    ended = [one for result in compared for one in result["comparisons"]]
    sentences = [
        f"{len(points)} kills at random moments of runs of {methods} methods: {len(points) - wrong} ended bit for bit as the unbroken run",
        f"{len(met)} faults at the writes of {_words([result['name'] for result in load('reliability/faults')])}: {sum(not point['wrong'] for point in met)} ended as they should",
        f"{sum(sum(one['killed'].values()) for one in ended)} kills in {sum(result['minutes'] for result in compared):.0f} minutes of comparisons: {sum(not one['wrong'] for one in ended)} of {len(ended)} ended with the same page",
        f"In 900 steps the memory of a process grew by at most {max(more):.1f} MiB, and with ten times the data its peak by {100 * (large / small - 1):.1f} %",
    ]
    return "".join(f"- {sentence}.\n" for sentence in sentences)


def _words(names: list[str]) -> str:
    return " and ".join(
        [", ".join(f"`{name}`" for name in names[:-1]), f"`{names[-1]}`"] if names[1:] else [f"`{names[0]}`"]
    )


def sections() -> list[str]:
    """Return all tables."""
    results = load("reliability/kills")
    return [
        KILLS,
        kills(),
        FAULTS,
        faults(),
        FUZZ,
        fuzz(),
        AGREEMENT,
        agreement(),
        *memory(),
        *compared(),
        origin(results[0], "reliability", 1),
    ]
