"""The tables of every kind of task and of the data pipeline, from results/tasks/*.json and results/data/*.json."""

from __future__ import annotations

from collections.abc import Iterator

from common import load, origin, percent, table

TASKS = """## Every kind of task: dense fine-tuning and LPAF at density 0.25

Dev metric in % of MiniLM-L6-H384, one seed, the same number of updates and rates as `benchmarks/tasks.py` says; QNLI,
SQuAD (windows of 256 tokens), CoNLL-2003 and the user's own CSV (question pairs) on a part of their rows. `before`:
right after the factorization. Minutes: fine-tuning; pruning and retraining. Memory: peak of the whole process.
"""
DATA = """## The data pipeline

Batches of like length against random ones, the same training step of MiniLM-L6-H384, median of interleaved rounds; and
tokenising, everything included: reading, checking, hashing, writing.
"""


def sections() -> Iterator[str]:
    """Yield what there are results for."""
    if results := load("tasks"):
        rows = []
        for r in results:
            records = {record["name"]: record for record in r["records"]}
            metric = r["metric"]["name"]
            before = records["retrain"]["initial"][f"val/{metric}"]
            seconds = [records[name]["seconds"] for name in ("dense", "prune", "retrain")]
            rows.append(
                [
                    r["name"], metric.replace("_", " "), percent(r["dense"]["metric"]),
                    percent(records["prune"]["metric"][f"val/{metric}"]),
                    percent(before), f"**{percent(r['compressed']['metric'])}**",
                    f"{r['compressed']['density']:.3f}", f"{r['ratios']['speedup']:.2f}x", f"{seconds[0] / 60:.1f}",
                    f"{sum(seconds[1:]) / 60:.1f}", f"{r['memory_mib']:,.0f} MiB",
                ]
            )  # fmt: skip
        header = ["task", "metric", "dense", "pruned", "before", "LPAF", "density", "CPU speed-up", "dense, min",
                  "LPAF, min", "memory"]  # fmt: skip
        yield from (TASKS, table(header, rows), origin(results[0], "tasks.py", results[0]["threads"]))
    if results := load("data"):
        yield DATA
        for r in results:
            rows = [
                [name, f"{v['random']:.1f}", f"{v['grouped']:.1f}", f"{v['ratio']:.2f}x", f"{v['tokens_ratio']:.2f}x"]
                for name, v in r["throughput"].items()
            ]
            header = ["task", "examples/s, random", "examples/s, like length", "ratio", "tokens, ratio"]
            yield table(header, rows)
            for v in r["tokenising"]:
                yield f"- {v['rows']:,} sentences: {v['seconds']:.1f} s, peak memory {v['memory_mib']:,.0f} MiB.\n"
            yield origin(r, "data.py", r["threads"])
