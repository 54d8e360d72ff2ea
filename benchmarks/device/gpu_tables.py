"""The tables of gpu.py, from results/gpu/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import load, table
from lit_compress.utils.timing import Speedup


def sections() -> Iterator[str]:
    """Yield the tables of every card that was measured."""
    yield """## Answers and training on a GPU

`python -m benchmarks.device.gpu` measures BERTs of random weights in bfloat16. *Even*: every block keeps as many heads and neurons;
*free*: blocks differ, some sub-layers are gone. *Graphs*: the forward is replayed as one CUDA graph.
"""
    found = load("device/gpu")
    for result in found:
        yield f"### {result['name'].replace('-', ' ')}, torch {result['versions']['torch']}\n"
        yield from tables(result)
    if not found:
        yield "Not measured: no machine with a GPU was there.\n"


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of one card."""
    answers = [row for row in result.get("answers", []) if "failed" not in row]
    for shape in dict.fromkeys(row["shape"] for row in answers):
        own = [row for row in answers if row["shape"] == shape]
        for way in dict.fromkeys(time["way"] for row in own for time in row.get("times", ())):
            yield f"{shape}, {way}: ms of the dense model, and how many times as fast the others are (texts x tokens)\n"
            yield _speeds(own, way)
        yield from _mixed([row for row in result.get("mixed", []) if row.get("shape") == shape])
    if rows := [row for row in result.get("compiled", []) if "failed" not in row]:
        yield f"{rows[0]['shape']}, blocks by torch.compile, then CUDA graphs: ms, and times the dense model's speed in the same way\n"
        yield _compiled(rows)
    if rows := [row for row in result.get("training", []) if row.get("ms")]:
        yield "A training step of 32 texts of 128 tokens, BERT-base's shape, density 0.25, bf16-mixed\n"
        dense = next((row for row in rows if row["method"] == "dense"), rows[0])
        yield table(
            ["method", "stage", "ms", "x dense", "peak MB", "x dense"],
            [[row["method"], row["stage"], f"{row['ms']:.1f}",
              f"{row['ms'] / row['dense_ms']:.2f}" if row["dense_ms"] else "",
              f"{row['peak_mb']:,.0f}", f"{row['peak_mb'] / dense['peak_mb']:.2f}"]
             for row in rows],
        )  # fmt: skip
    for row in result.get("factorize", []):
        if "seconds" in row:
            yield f"`factorize` of BERT-base's shape, all checks included: {row['seconds']:.0f} s, {row['peak_mib']:,.0f} MiB of the host.\n"
    for part in ("answers", "mixed", "compiled", "training", "factorize"):
        for row in result.get(part, []):
            if "failed" in row:
                yield f"Not measured: {part} {row.get('method') or row.get('shape', '')}: {row['failed']}\n"


def _speeds(rows: list[dict[str, Any]], way: str) -> str:
    """Return the table of one way: a row for every form, a column for every shape of the batch."""
    timed, sizes = [row for row in rows if "times" in row], [row for row in rows if "form" in row]
    of = {
        (row["batch"], row["length"], time["form"]): time
        for row in timed
        for time in row["times"]
        if time["way"] == way
    }
    shapes = [(row["batch"], row["length"]) for row in timed]
    body = []
    for size in sizes:
        form = size["form"]
        cells = [
            f"{of[*shape, form]['median']:.2f} ms" if form == "dense" else shown(of[*shape, form]["over_dense"])
            for shape in shapes
        ]
        body.append([form, f"{size['density']:.3f}", f"{size['weights_mb']:.0f}", f"{size['peak_mb']:.0f}", *cells])
    head = ["form", "density", "MB", "peak MB at 32 x 128", *(f"{batch} x {length}" for batch, length in shapes)]
    return table(head, body)


def shown(gain: dict[str, float]) -> str:
    """Return a speed-up for a cell; nothing that the spread does not carry."""
    found = Speedup(gain["median"], gain["low"], gain["high"])
    return f"{found.median:.2f}x" if found.is_named else "≈1x" if found.verdict == "noise" else f"≈{found.median:.1f}x"


def _mixed(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        ways = list(dict.fromkeys(each["way"] for each in row["mixed"]))
        of = {(each["form"], each["way"]): each["texts_a_second"] for each in row["mixed"]}
        forms = dict.fromkeys(each["form"] for each in row["mixed"])
        yield f"{row['shape']}, 512 texts of 8 to 384 tokens in batches of 32; *packed*: without padding: texts a second\n"
        yield table(["form", *ways], [[form, *(f"{of[form, way]:,.0f}" for way in ways)] for form in forms])


def _compiled(rows: list[dict[str, Any]]) -> str:
    """Return the table of compiled blocks next to CUDA graphs alone."""
    forms = list(dict.fromkeys(time["form"] for time in rows[0]["times"]))
    head = ["form", "compiled and first call, s"]
    head += [f"{row['batch']} x {row['length']}, {way}" for row in rows for way in ("graphs", "compiled")]
    body = []
    for form in forms:
        cells = [
            f"{time['median']:.2f} ms" + ("" if form == "dense" else f" ({shown(time['over_dense'])})")
            for row in rows for way in ("graphs", "compiled")
            for time in row["times"] if (time["form"], time["way"]) == (form, way)
        ]  # fmt: skip
        body.append([form, f"{rows[0]['first'].get(form, 0):.0f}", *cells])
    return table(head, body)
