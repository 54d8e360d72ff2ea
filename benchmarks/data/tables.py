"""The tables of the data pipeline, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common import load, origin, table

TITLE = "The data pipeline"
ABOUT = "Training throughput with batches of similar length and with random ones; time and memory of reading and tokenising."

HEAD = """## The data pipeline

Examples per second with batches of similar length and with random ones, the same training step of MiniLM-L6-H384,
median of rounds that take turns; and the time of tokenising, with reading, checking, hashing and writing.
"""


def sections() -> Iterator[str]:
    """Yield the sections that have results."""
    if results := load("data"):
        yield HEAD
        for r in results:
            rows = [
                [name, f"{v['random']:.1f}", f"{v['grouped']:.1f}", f"{v['ratio']:.2f}x", f"{v['tokens_ratio']:.2f}x"]
                for name, v in r["throughput"].items()
            ]
            header = ["task", "examples/s, random", "examples/s, similar length", "ratio", "tokens, ratio"]
            yield table(header, rows)
            for v in r["tokenising"]:
                yield f"- {v['rows']:,} sentences: {v['seconds']:.1f} s, peak memory {v['memory_mib']:,.0f} MiB.\n"
            yield origin(r, "data", r["threads"])
