"""The table of benchmarks/results/architectures/."""

from __future__ import annotations

from common import load, origin, percent, table

HEAD = """## BART, T5, OPT and Llama: the whole pipeline on real text

Small random nets (2 layers, width 128, 4 heads; Llama with 2 heads of keys, T5 gated) and tokenizers trained on the
spot: what is shown is that data, fit, export and `generate` work on every architecture and that budgets hold, not how
good a method is: after 26 updates most write nothing of their own accord. XSum: 200 of its training texts and 24 of its
test; CNN/DailyMail: 200 of validation (no training rows were at hand) and 24 of test; plain text: 150,000 letters of
tiny Shakespeare; wikitext-2: as many of its validation to train on; 30,000 letters to score. ROUGE x 100 of summaries
with 2 beams and at most 32 tokens; perplexity of all tokens, of other vocabularies than published ones. `elsewhere`:
largest difference of the logits of the export in a process without lit_compress; `cache`: made to write 24 tokens, the
export writes the same ones with and without its cache.
"""


def sections() -> list[str]:
    """Return the section, or nothing without results."""
    results = load("architectures")
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
            percent(found["density"]), percent(r["ratios"]["params"]["total"]), percent(r["ratios"]["flops"]),
            f"{r['ratios']['speedup']:.2f}", f"{r['export_difference']:.0e}",
            "same" if r["cache_equal"] else "DIFFERS",
        ])  # fmt: skip
    header = ["net", "task", "method", "dense", "compressed", "density %", "parameters %", "FLOPs %", "CPU speed-up",
              "elsewhere", "cache"]  # fmt: skip
    return [HEAD, table(header, rows), origin(results[0], "architectures.py", 1)]
