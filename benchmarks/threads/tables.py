"""The table of threads on a quiet and on a busy machine, from results/*.json."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common import load, origin, table

TITLE = "Threads on a busy machine"
ABOUT = "Training steps per second with one and two threads, waiting asleep or awake, on a quiet machine and next to a process that spins."

HEAD = """## Steps per second

Median (smallest - largest) over rounds that take turns. `busy`: one other process that never waits. `left`: the share of
the processor that a run's threads get next to it if all threads are treated alike. The last column is busy / quiet time
of a step, times that share; the goal is 1.3. **Bold**: what a run takes by itself.
"""


def share_left(threads: int, cores: int) -> float:
    """Return what ``threads`` get next to one more thread, as a fraction of what they get alone.

    >>> share_left(1, 2), round(share_left(2, 2), 3)
    (1.0, 0.667)
    """
    return min(threads, cores * threads / (threads + 1)) / min(threads, cores)


def cost(row: dict[str, Any], cores: int) -> float:
    """Return busy / quiet time of a step per share of the processor that is left."""
    return median(row["quiet"]) / median(row["busy"]) * share_left(row["threads"], cores)


def sections() -> list[str]:
    """Return the table."""
    results = load("threads")
    rows = []
    for result in results:
        cores, taken = result["hardware"]["cores"], result["chosen"]
        for row in result["steps_per_second"]:
            mine = row["threads"] == taken["threads"] and row["policy"] == taken["policy"]
            shown = [
                result["name"], str(row["threads"]), row["policy"] if row["threads"] > 1 else "any",
                _speed(row["quiet"]), _speed(row["busy"]), f"{share_left(row['threads'], cores):.2f}",
                f"{cost(row, cores):.2f}",
            ]  # fmt: skip
            rows.append([f"**{cell}**" for cell in shown] if mine else shown)
    header = ["model", "threads", "OMP_WAIT_POLICY", "quiet", "busy", "left", "time per share left"]
    return [
        HEAD,
        table(header, rows),
        *([origin(results[0], "threads", 1).replace("1 thread(s), ", "")] if results else []),
    ]


def _speed(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
