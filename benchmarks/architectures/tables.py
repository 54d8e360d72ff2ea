"""The table of BART, T5, OPT and Llama, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from typing import Any

from benchmarks.architectures.decoders import BLOCKS, CELLS, SCRIPT
from benchmarks.common import file_density, load, origin, percent, table
from benchmarks.gains import with_gains

STUDY = "architectures"
TITLE = "BART, T5, OPT and Llama: the whole pipeline"
ABOUT = "Small random models of every other architecture through data, fit, export and `generate` on real text."

HEAD = """## BART, T5, OPT and Llama: the whole pipeline on real text

Small random models (2 layers, width 128, 4 heads; Llama with 2 heads of keys, T5 gated) with tokenizers trained on the
same texts. The table shows that data, fit, export and `generate` work on every architecture and that budgets hold, not
how good a method is: after 26 steps most models end a text at once. XSum: 200 texts of its training split and 24 of its
test split; CNN/DailyMail: 200 of validation (no training rows were at hand) and 24 of test; plain text: 150,000 letters
of tiny Shakespeare; wikitext-2: 150,000 letters of its validation split to train on; 30,000 letters for the metric.
ROUGE x 100 of summaries with 2 beams and at most 32 tokens; perplexity per token of own vocabularies, so not comparable
with published ones. `elsewhere`: largest difference of the export's logits in a process without lit_compress; `cache`:
whether the export, made to write 24 tokens, writes the same ones with and without its cache.
"""


NAMES = {
    "second_order": "SecondOrder",
    "structures": "SecondOrder, heads and neurons, uniform",
    "slicegpt": "SliceGPT",
    "llm_pruner": "LLM-Pruner",
    "svd": "SVD",
    "fwsvd": "FWSVD",
    "lpaf": "LPAF",
    "losparse": "LoSparse",
    "itp": "ITP",
    "flop": "FLOP",
    "sp3": "SP3",
    "flop_fast": "FLOP, gates at 0.3",
    "sp3_fast": "SP3, gates at 0.4",
    "theseus": "BERT-of-Theseus",
    "magnitude": "Magnitude (zeros are stored)",
    "movement": "Movement",
    "first_order": "First order (zeros are stored)",
    "platon": "PLATON (zeros are stored)",
}


DECODER = """## Perplexity of the first third of WikiText-2's test split

The model: 4 blocks, 256 wide, 8 heads, 5.0 million parameters of which {sites:,} are in the blocks, 8,000 pieces, trained here from
nothing on 2.6 million pieces (twice), since neither weights of a decoder nor WikiText-2's training split were at hand. Dense it has a perplexity of
{dense:.1f} by piece, {word:.0f} by word: numbers compare within this table only. Below: by piece. Density is asked of the blocks' matrices.
"""
PARTS = {
    "-0": "### Without training\n",
    "": "### After 100 steps\n\nBatches of 16 blocks of 256 pieces, rate 3e-4, alpha 0.5 of the dense model's logits. One seed.\n",
}

PUBLISHED = """### Published, on WikiText-2

Models of 7 billion parameters, without training; the papers remove at most 30 % of the weights.
"""
# method, model, share of the weights that goes, dense perplexity and after: SliceGPT's Table 1, LLM-Pruner's Table 1
PAPERS = [
    ("SliceGPT", "Llama-2 7B", 0.2, 5.47, 6.64),
    ("SliceGPT", "Llama-2 7B", 0.25, 5.47, 7.24),
    ("SliceGPT", "Llama-2 7B", 0.3, 5.47, 8.12),
    ("LLM-Pruner, element1", "LLaMA-7B", 0.2, 12.6, 19.1),
    ("LLM-Pruner, element2", "LLaMA-7B", 0.2, 12.6, 19.8),
    ("LLM-Pruner, vector", "LLaMA-7B", 0.2, 12.6, 22.3),
]


def sections() -> list[str]:
    """Return the section, or [] without results."""
    results = with_gains(load(STUDY))
    if not results:
        return []
    rows = []
    for r in results:
        dense, found = r["dense"], r["compressed"]
        name = r["metric"]["name"]
        show = (lambda v: f"{v:.1f}") if name == "perplexity" else (lambda v: f"{100 * v:.2f}")
        rows.append([
            r["file"].partition("-")[0], r["task"], r["method"],
            f"{name} {show(dense['metric'])}", show(found["metric"]),
            percent(file_density(r)), percent(r["ratios"]["params"]["total"]), percent(r["ratios"]["flops"]),
            str(r["gain"]).rstrip("x"), f"{r['export_difference']:.0e}",
            "same" if r["cache_equal"] else "DIFFERS",
        ])  # fmt: skip
    header = ["model", "task", "method", "dense", "compressed", "density %", "parameters %", "FLOPs %", "CPU speed-up",
              "elsewhere", "cache"]  # fmt: skip
    return [HEAD, table(header, rows), origin(results[0], STUDY, 1), *decoders()]


def by_word(result: dict[str, Any]) -> float:
    """Return the dense model's perplexity by word, from that by piece: the loss of all pieces, shared by the words."""
    return exp(log(result["dense"]["metric"]) * result["pieces"] / result["words"])


def decoders() -> Iterator[str]:
    """Yield the tables of all methods on a decoder, without training and after it."""
    results = {(r["cell"], asked(r)): r for r in load(SCRIPT)}
    if not results:
        return
    some = next(iter(results.values()))
    dense = some["dense"]
    yield DECODER.format(sites=dense["params"]["sites"], dense=dense["metric"], word=by_word(some))
    for ending, head in PARTS.items():
        own = {cell: found for cell, found in results.items() if cell[0].endswith("-0") == bool(ending)}
        densities = sorted({density for _, density in own}, reverse=True)
        rows, left = [], []
        for cell in (cell for cell in CELLS if cell.endswith("-0") == bool(ending)):
            found, name = [own.get((cell, density)) for density in densities], NAMES[cell.removesuffix("-0")]
            if any(found):
                rows.append([name, *(shown(r, d) if r else "not run" for r, d in zip(found, densities, strict=True))])
            else:
                left.append(name)
        if rows:
            yield head
            yield table(["method", *(f"{density:g}" for density in densities)], rows)
            if left:
                yield f"Not run: {'; '.join(left)}.\n"
    yield origin(some, SCRIPT, 1)
    yield PUBLISHED
    yield table(
        ["method", "model", "goes", "dense", "after", "times the dense"],
        [[method, net, f"{goes:.0%}", f"{dense:g}", f"{after:g}", f"{after / dense:.2f}"]
         for method, net, goes, dense, after in PAPERS],
    )  # fmt: skip


def asked(result: dict[str, Any]) -> float:
    """Return the density in whose column a result is; whole blocks are in the nearest."""
    target: float = result["target"]
    if result["cell"] != "theseus":
        return target
    return next(density for density, blocks in BLOCKS.items() if blocks == target)


def shown(result: dict[str, Any], density: float) -> str:
    """Return the perplexity of an export, and its density where that is not the one asked for."""
    kept = result["compressed"]["density"]
    note = "" if abs(kept - density) < 0.01 else f" (at {kept:.2f})"
    return f"{result['compressed']['metric']:.1f}{note}"
