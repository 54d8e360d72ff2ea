"""The table of all types of task, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common import file_density, load, origin, percent, table
from benchmarks.gains import with_gains

STUDY = "tasks"
TITLE = "Every type of task"
ABOUT = "Dense fine-tuning and LPAF at 0.25 on GLUE, SQuAD, CoNLL-2003 and a user's own CSV: metric, minutes, memory."

HEAD = """## Every type of task: dense fine-tuning and LPAF at density 0.25

Dev metric in % of MiniLM-L6-H384, one seed, with the steps and learning rates of `benchmarks/tasks/run.py`; QNLI, SQuAD
(windows of 256 tokens), CoNLL-2003 and the user's own CSV (question pairs) on a part of their rows. `before`: right after
the factorization. Minutes: of fine-tuning, and of pruning and retraining. Memory: peak of the whole process.
"""


def sections() -> Iterator[str]:
    """Yield the section of the page, if there are results."""
    if results := with_gains(load(STUDY)):
        rows = []
        for r in results:
            records = {record["name"]: record for record in r["records"]}
            metric = r["metric"]["name"]
            before = records["retrain"]["initial"][f"val/{metric}"]
            dense = r.get("dense_seconds") or records["dense"]["seconds"]  # older runs fine-tuned themselves
            seconds = [dense, *(records[name]["seconds"] for name in ("prune", "retrain"))]
            rows.append(
                [
                    r["name"], metric.replace("_", " "), percent(r["dense"]["metric"]),
                    percent(records["prune"]["metric"][f"val/{metric}"]),
                    percent(before), f"**{percent(r['compressed']['metric'])}**",
                    f"{file_density(r):.3f}", str(r["gain"]), f"{seconds[0] / 60:.1f}",
                    f"{sum(seconds[1:]) / 60:.1f}", f"{r['memory_mib']:,.0f} MiB",
                ]
            )  # fmt: skip
        header = ["task", "metric", "dense", "pruned", "before", "LPAF", "density", "CPU speed-up", "dense, min",
                  "LPAF, min", "memory"]  # fmt: skip
        yield from (HEAD, table(header, rows), origin(results[0], STUDY, results[0]["threads"]))
