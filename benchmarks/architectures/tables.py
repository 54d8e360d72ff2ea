"""The table of BART, T5, OPT and Llama, from results/*.json."""

from __future__ import annotations

from benchmarks.common import file_density, load, origin, percent, table

STUDY = "architectures"
TITLE = "BART, T5, OPT and Llama: the whole pipeline"
ABOUT = "Small random nets of every other architecture through data, fit, export and `generate` on real text."

HEAD = """## BART, T5, OPT and Llama: the whole pipeline on real text

Small random nets (2 layers, width 128, 4 heads; Llama with 2 heads of keys, T5 gated) with tokenizers trained on the
same texts. The table shows that data, fit, export and `generate` work on every architecture and that budgets hold, not
how good a method is: after 26 updates most nets end a text at once. XSum: 200 texts of its training split and 24 of its
test split; CNN/DailyMail: 200 of validation (no training rows were at hand) and 24 of test; plain text: 150,000 letters
of tiny Shakespeare; wikitext-2: 150,000 letters of its validation split to train on; 30,000 letters for the metric.
ROUGE x 100 of summaries with 2 beams and at most 32 tokens; perplexity per token of own vocabularies, so not comparable
with published ones. `elsewhere`: largest difference of the export's logits in a process without lit_compress; `cache`:
whether the export, made to write 24 tokens, writes the same ones with and without its cache.
"""


def sections() -> list[str]:
    """Return the section, or [] without results."""
    results = load(STUDY)
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
            f"{r['ratios']['speedup']:.2f}", f"{r['export_difference']:.0e}",
            "same" if r["cache_equal"] else "DIFFERS",
        ])  # fmt: skip
    header = ["net", "task", "method", "dense", "compressed", "density %", "parameters %", "FLOPs %", "CPU speed-up",
              "elsewhere", "cache"]  # fmt: skip
    return [HEAD, table(header, rows), origin(results[0], STUDY, 1)]
