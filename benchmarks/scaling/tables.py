"""The tables of what a step keeps and sends, measured and by formula, from results/*.json."""

from __future__ import annotations

from typing import Any

from benchmarks.common import load, origin, table

TITLE = "What a step keeps and sends"
ABOUT = "Bytes that every method keeps on a rank and hands to the collectives per step, on 1, 2 and 4 processes, compared with a formula; the page is docs/explanation/memory.md."
FORWARDS = {("LPAF", "retrain"): 2}  # of a step; all others have one
HISTOGRAM = 8 * 2**16  # bytes of the sums from which a threshold over shards is found
HISTOGRAMS = {("LPAF", "prune"): 1}  # of most steps of a stage
TRAIN_OWN = ("CoFi", "SP3")  # gates and maps, trained next to the model, whole on every rank
# name -> layers, width, width of keys, neurons, vocabulary, tied embeddings: Llama 3's sizes
NETS = {"1B": (16, 2048, 512, 8192, 128256, True), "8B": (32, 4096, 1024, 14336, 128256, False),
        "70B": (80, 8192, 1024, 28672, 128256, False)}  # fmt: skip
GPUS = (8, 64, 512)
GIB = 2**30


def sent(row: dict[str, Any]) -> float:
    """Return the bytes of gradients, parameters and thresholds that a step hands to the collectives, by the formula."""
    forwards, sums = (known.get((row["method"], row["stage"])) for known in (FORWARDS, HISTOGRAMS))
    if row["processes"] == 1:
        return 0
    p, b, t = row["parameters"], row["blocks"], row["trained"]
    own = row["kept"]["of the method"] if row["method"] in TRAIN_OWN else 0
    gathered = 4 * (p - b) + 8 * (forwards or 1) * b + HISTOGRAM * (sums or 0)
    return own + 4 * t + (gathered if row["strategy"] == "fsdp2" else 0)


def kept(row: dict[str, Any]) -> float:
    """Return the bytes of parameters and moments of AdamW on a rank, by the formula."""
    own = row["kept"]["of the method"] if row["method"] in TRAIN_OWN else 0
    shards = row["processes"] if row["strategy"] == "fsdp2" else 1
    return 2 * own + (4 * row["parameters"] + 8 * row["trained"]) / shards


def measured() -> list[dict[str, Any]]:
    """Return all rows, with the method and the width."""
    return [{"method": r["method"], "width": r["width"], **row} for r in load("scaling") for row in r["rows"]]


def step_table() -> str:
    """Return what was measured next to the formulas."""
    rows = []
    for row in measured():
        total = sum(value for name, value in row["sent"].items() if "wrap" not in name)  # that is no collective
        formula = sent(row)
        own, held = row["kept"]["parameters"] + row["kept"]["moments"], kept(row)
        rows.append([
            f"{row['method']} {row['stage']}", str(row["width"]), f"{row['processes']} {row['strategy']}"
            if row["processes"] > 1 else "1", f"{row['parameters']:,}", f"{own:,}", f"{own / held:.2f}",
            f"{row['kept']['of the method']:,}", f"{row['kept']['teacher']:,}", f"{total:,.0f}",
            f"{total / formula:.2f}" if formula else "", f"{row['most']:,}",
        ])  # fmt: skip
    header = ["stage", "width", "processes", "parameters", "parameters and moments kept", "/ formula",
              "kept by the method", "teacher", "sent per step", "/ formula", "most in a step"]  # fmt: skip
    return table(header, rows)


def sizes(name: str) -> tuple[int, int]:
    """Return the parameters of a model, and those of its blocks.

    >>> sizes("8B")
    (8030261248, 6979584000)
    """
    layers, width, keys, neurons, vocabulary, is_tied = NETS[name]
    block = 2 * width * width + 2 * width * keys + 3 * width * neurons + 2 * width
    return layers * block + width + vocabulary * width * (1 if is_tied else 2), layers * block


def per_gpu(name: str, gpus: int) -> dict[str, float]:
    """Return the bytes of a rank under FSDP2, by the formulas, in a stage with a score per weight and a teacher."""
    p, b = sizes(name)
    layers = NETS[name][0]
    return {
        "sharded": (4 + 4 + 8) * p / gpus,
        "scores": 4 * b / gpus,
        "gathered": 4 * (2 * b / layers + p - b),  # two blocks, as the next one is fetched ahead, and the rest
        "teacher": 4 * p,
        "sent": 4 * (p - b) + 8 * b + 4 * p,
        "cpu": 4 * p * min(8, gpus),  # every process of a machine builds the whole model
    }


def scale_table() -> str:
    """Return the extrapolation to larger models."""
    rows = []
    for name in NETS:
        for gpus in GPUS:
            found = per_gpu(name, gpus)
            held = ("sharded", "scores", "gathered", "teacher")
            rows.append([
                name, str(gpus), *(f"{found[part] / GIB:,.1f}" for part in held),
                f"{sum(found[part] for part in held) / GIB:,.1f}", f"{found['sent'] / GIB:,.0f}",
                f"{found['sent'] / 50e9:,.1f}", f"{found['cpu'] / GIB:,.0f}",
            ])  # fmt: skip
    header = ["model", "GPUs", "sharded", "scores", "gathered", "teacher", "GiB on a GPU", "sent, GiB", "s at 50 GB/s",
              "CPU, GiB a machine"]  # fmt: skip
    return table(header, rows)


def sections() -> list[str]:
    """Return the table of the study's page."""
    results = load("scaling")
    last = [origin(results[0], "scaling", 1).replace("1 thread(s), ", "")] if results else []
    return ["## Measured\n", step_table(), *last, "\n## One block at a time\n", block_table()]


def block_table() -> str:
    """Return the peak memory of ``factorize --by_block``; seconds of blocks that were not run are extrapolated."""
    rows = []
    for r in sorted(load("scaling/by_block"), key=lambda found: found["parameters"]):
        memory, seconds, more = r["memory"], r["seconds"], r["blocks"] / r["run"]
        rows.append([
            r["name"], f"{r['width']} x {r['inner']}", f"{r['run']} of {r['blocks']}", f"{r['parameters']:,}",
            *(f"{memory[part] / 2**20:,.0f}" for part in ("outside", "block", "statistics", "bound")),
            f"{r['peak_mib']:,.0f}", f"{r['examples']} x {r['length']}", f"{sum(seconds.values()) * more:,.0f}",
        ])  # fmt: skip
    header = ["model", "width x inner", "blocks run", "parameters run", "outside, MiB", "a block", "its sums", "bound", "peak",
              "tokens", "seconds for all blocks"]  # fmt: skip
    return table(header, rows)
