"""The tables of base-size encoders, from results/<task>.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.base_size.run import STUDY, TASKS, summary
from benchmarks.common import load, origin, percent, table
from lit_compress.evaluation.intervals import standard_error

TITLE = "A base-size encoder: MPNet, 12 x 768"
ABOUT = "All methods on `all-mpnet-base-v2` (110M parameters) on GLUE tasks, many runs at once on one GPU."

HEAD = """## Every method

Dev metric in %: accuracy on SST-2, MRPC and RTE, Matthews' correlation on CoLA, the mean of Pearson's and Spearman's correlation
on STS-B; standard errors over the dev set are {errors}. *Density*: of the stored files. A
dash: the time was over before this run. {fairness} MRPC and RTE have 400 steps.
"""
TASK = """## {name}: {rows} runs

*Held out*: the metric on the training rows that chose the epoch. *Before*: right after the compression, before training.
"""
ON_A_CPU = """## On one CPU core

The settings of `base_size.yaml` and other teachers, in bf16-mixed with one thread of an {machine}. Each JSON in `results/cpu` has its run's config.
Teacher and LoSparse are made by
`compare --config benchmarks/base_size/base_size.yaml --data.task stsb --trainer.precision bf16-mixed --methods LoSparse --budgets 0.1`.
Rows at another rate have `--learning_rates 5e-5`. Heads and neurons of stsb are as many as the program needs that is 6 times as fast (below).
"""
COLUMNS = ["asked", "method", "seed", "density", "dev", "± error", "held out", "before", "of dense", "bytes", "steps", "seconds",
           "GPU, GiB"]  # fmt: skip


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Return a row for every run of a task, the best first at a density."""
    made = sorted(result["rows"], key=lambda row: (row["asked"], -row["metric"]))
    return [
        [
            row["asked"].removeprefix("density="), row["label"], str(row["seed"]), f"{row['density']:.3f}",
            percent(row["metric"]), percent(standard_error(row["interval"])),
            percent(row["held_out"]) if row["held_out"] is not None else "",
            percent(row["initial"]) if row["initial"] is not None else "", percent(row["metric"] / row["dense"]),
            f"{row['ratios']['bytes']:.2f}", f"{row['steps']:,}", f"{row['seconds']:.0f}",
            f"{row['gpu_peak_mib'] / 1024:.1f}",
        ]
        for row in made
    ]  # fmt: skip


def on_a_cpu() -> Iterator[str]:
    """Yield a table for every task with a teacher of the CPU."""
    results = load(f"{STUDY}/cpu")
    yield ON_A_CPU.format(machine=results[0]["hardware"]["cpu"])
    for task in TASKS:
        if made := [result for result in results if result["task"] == task]:
            yield f"### {task}\n"
            yield _of_task(sorted(made, key=lambda result: -result["compressed"]["metric"]))


def _of_task(found: list[dict[str, Any]]) -> str:
    """Return the table of runs with one teacher of the CPU."""
    name = f"val/{found[0]['metric']['name']}"
    rows = [["dense", "1", "", "", *_dev(found[0]["dense"]), "", "1", ""]]
    for result in found:
        small, records, init = result["compressed"], result.get("records", []), result["config"]["model"]["init_args"]
        held_out = records and records[-1]["held_out"]
        taught = result["distilled"] if not records else {
            "steps": sum(record["steps"] for record in records[1:]),
            "learning_rate": init[records[-1]["name"]]["learning_rate"],
        }  # fmt: skip
        rows.append([
            result["label"], f"{small['density']:.3f}", f"{taught['steps']:,}", f"{taught['learning_rate']:g}",
            *_dev(small), percent(held_out[name]) if held_out else "",
            f"{result['ratios']['bytes']:.2f}", percent(small["metric"] / result["dense"]["metric"]),
        ])  # fmt: skip
    return table(["method", "density", "steps", "rate", "dev", "± error", "held out", "bytes", "of dense"], rows)


def _dev(net: dict[str, Any]) -> tuple[str, str]:
    return percent(net["metric"]), percent(standard_error(net["interval"]))


PROGRAMS = {
    "stsb": """## Programs of 8 bits

The models of README's table in both runtimes, on an {machine} with VNNI and one thread, by the command in `results/programs/stsb.json`.
*Times*: as fast as the dense model's program in the same runtime.
""",
    "speed": """## Programs that were asked for by their speed

`fit --model.budget speedup=6x@openvino-int8,32x128`, and 10x, with 1,000 steps and the settings of `base_size.yaml`: heads, neurons and
whole sub-layers go. Another teacher of the same command, the same processor, one thread, a quiet machine; commands in `results/programs/speed.json`.
""",
}
OPERATIONS = """## The time of a program, by operation

Of OpenVINO's programs in 8 bits at {batch} x {length} tokens, in ms, one thread of an {machine} with VNNI. The models have a new head and were
calibrated on 64 texts: the table is about times alone. *Attention*: products of queries, keys and values, and softmax. *Rest*: sums, transposes,
activations, rounding. The programs are of `factorize HEAD OUT --data.task stsb --density 0.1 --calibration_examples 64 --format openvino --dtype int8`, the
dense one at density 1, the last one with `--removes structures`.
"""
LENGTH = 32
FRONT = """all-mpnet-base-v2 (110M parameters) on STS-B, the mean of two correlations in %. Time: one text of {length} tokens, one thread of an {machine} with VNNI.

{table}

8-bit programs are OpenVINO's, the rest is PyTorch. One seed, one standard error. STS-B is the easiest task for this model: small tasks
[lose more](benchmarks/base_size/README.md). Also: [22M parameters](docs/explanation/benchmarks.md), [on a GPU](docs/explanation/gpu.md).
"""


def front() -> str:
    """Return the table of README.md: one model and task, before and after, from results/front/."""
    found = load(f"{STUDY}/front")[0]
    own = {(entry["net"], entry["runtime"]): entry for entry in found["programs"]}
    shape = next(shape for shape in found["shapes"] if (shape["batch"], shape["length"]) == (1, LENGTH))
    one = {(time["net"], time["runtime"]): time["median"] for time in shape["times"]}

    def row(name: str, key: tuple[str, str]) -> list[str]:
        entry = own[key]
        return [name, f"{percent(entry['metric'])} ± {percent(standard_error(entry['interval']))}",
                f"{entry['bytes'] / 1e6:.0f} MB", f"{one[key]:.0f} ms"]  # fmt: skip

    body = [
        row("your model, fine-tuned", ("dense", "eager")),
        row("`factorize`, density 0.25, no training", ("c25", "eager")),
        row("`fit`, density 0.10, 1,000 steps", ("compressed", "eager")),
        row("the last one as 8-bit program", ("compressed", "openvino-int8")),
        row("to compare: the dense 8-bit program", ("dense", "openvino-int8")),
    ]
    return FRONT.format(
        length=LENGTH, machine=found["hardware"]["cpu"],
        table=table(["model", "metric", "file", "time"], body).rstrip(),
    )  # fmt: skip


def how_small() -> str:
    """Return the table of docs/how_to/how_small.md: components of all tasks, of those without a GPU from results/cpu/."""
    rows = []
    for task in TASKS:
        runs = {(row["label"], row["asked"]): row["metric"] for row in load_rows(task)}
        dense = [row["dense"] for row in load_rows(task)]
        for made in load(f"{STUDY}/cpu") if not runs else ():
            if made["task"] == task:
                runs[made["label"], f"density={made['config']['model']['init_args']['density']}"] = made["compressed"][
                    "metric"
                ]
                dense.append(made["dense"]["metric"])
        wanted = [("SecondOrder, no training", 0.25), ("SecondOrder", 0.25), ("SecondOrder", 0.1), ("SecondOrder", 0.05),
                  ("SecondOrder, structures", 0.1)]  # fmt: skip
        found = [runs.get((label, f"density={density}")) for label, density in wanted]
        rows.append([task, percent(dense[0]), *("" if metric is None else percent(metric) for metric in found)])
    head = ["task", "dense", "0.25, no training", "0.25", "0.10", "0.05", "heads and neurons, 0.10"]
    return table(head, rows).rstrip()


def figures() -> Iterator[tuple[str, Any]]:
    """Yield the picture of README.md: metric over megabytes."""
    from matplotlib.figure import Figure

    whole, rows = load(f"{STUDY}/front")[0]["programs"][0]["bytes"] / 1e6, load_rows("stsb")
    drawn = Figure(figsize=(6.0, 3.6), layout="constrained", dpi=100)
    axes = drawn.subplots()
    for label, name, colour in (
        ("SecondOrder", "fit, 1,000 steps", "#1f6fb4"), ("SecondOrder, no training", "factorize, no training", "#d9822b"),
    ):  # fmt: skip
        points = sorted(
            (row["ratios"]["bytes"] * whole, row["metric"], row["interval"]) for row in rows if row["label"] == label
        )
        metrics = [100 * metric for _, metric, _ in points]
        errors = [100 * standard_error(interval) for *_, interval in points]
        axes.errorbar(
            [size for size, *_ in points], metrics, errors, color=colour, marker="o", capsize=3, linewidth=2, label=name
        )
    axes.axhline(100 * rows[0]["dense"], color="grey", linestyle="--", label=f"dense, {whole:.0f} MB")
    axes.set(xlabel="MB of the file", ylabel="STS-B, %", title="MPNet-base, float32, trained on a GPU")
    axes.set_xlim(100, 200)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.6), frameon=False)
    yield "stsb", drawn


def load_rows(task: str) -> list[dict[str, Any]]:
    """Return the runs of a task."""
    return next((made["rows"] for made in load(STUDY) if made["name"] == task), [])


def sections() -> list[str]:
    """Return the tables."""
    results = sorted((made for made in load(STUDY) if made["rows"]), key=lambda made: TASKS.index(made["name"]))
    errors = ", ".join(
        f"{percent(standard_error(made['rows'][0]['dense_interval'] or made['rows'][0]['interval']))} on {made['name']}"
        for made in results
    )
    made = [HEAD.format(errors=errors, fairness=results[0]["fairness"]), summary(results)]
    for result in results:
        failed = "".join(f"- {name} failed: {error}\n" for name, error in result["failed"].items())
        made += [TASK.format(name=result["name"], rows=len(result["rows"])), table(COLUMNS, rows_of(result)), failed]
    return [*filter(None, made), origin(results[0], STUDY, 1), *on_a_cpu(), *programs(), *operations()]


def programs() -> Iterator[str]:
    """Yield the table of programs of long texts, if there is a result."""
    for found in load(f"{STUDY}/programs"):
        times = {(time["net"], time["runtime"]): time for time in found["shapes"][-1]["times"]}
        rows = []
        for entry in found["programs"]:
            key = entry["net"], entry["runtime"]
            time = times.get(key, {})  # files with a smaller vocabulary were not timed
            gain = time.get("over_dense")
            rows.append([
                found["nets"][entry["net"]], entry["runtime"],
                f"{percent(entry['metric'])} ± {percent(standard_error(entry['interval']))}",
                f"{entry['bytes'] / 1e6:.0f}", f"{time['median']:,.0f}" if time else "",
                f"{gain['median']:.1f} ({gain['low']:.1f} - {gain['high']:.1f})" if gain else "",
            ])  # fmt: skip
        shape = found["shapes"][-1]
        yield PROGRAMS[found["file"]].format(machine=found["hardware"]["cpu"])
        yield table(["model", "runtime", "stsb", "MB", f"ms, {shape['batch']} x {shape['length']}", "times"], rows)


def operations() -> Iterator[str]:
    """Yield the table of the time by operation, if there is a result."""
    for found in load(f"{STUDY}/operations"):
        kinds = list(found["rows"][0]["kinds"])
        rows = [[row["name"], f"{row['ms']:,.0f}", *(f"{row['kinds'][kind]:,.0f}" for kind in kinds)]
                for row in found["rows"]]  # fmt: skip
        yield OPERATIONS.format(batch=found["batch"], length=found["length"], machine=found["hardware"]["cpu"])
        yield table(["model", "all", *kinds], rows)
