"""The tables of time and memory of LPAF's stages, from results/*.json."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common import held, load, origin, spread, table

TITLE = "Time and memory of LPAF's stages, speed of low rank"
ABOUT = "A step of pruning, of mixed-rank retraining and of SVD's retraining compared with a dense step, on a CPU: time, peak memory, factorization, `--help`; what low rank saves in time and in FLOPs."

STEPS = """## Time of a training step / a dense fine-tuning step

No distillation in either step, batch 32 x 128 tokens, density 0.25; median over rounds that take turns (smallest -
largest). `p=0` is the second half of LPAF's retraining; rows without it have p = p_init / 2, its mean over the first half.
"""

MEMORY = """## Peak memory / dense fine-tuning

Peak resident size of a whole process that makes two of the steps above, with MALLOC_MMAP_THRESHOLD_=65536 (memory in
use), unless a column says default allocator (which also counts memory that glibc keeps).
"""


LOW_RANK = """## Time that low rank saves / FLOPs that it saves

BERT-base shapes, {layers} blocks, random weights, {batch} texts of {length} tokens, {threads} thread: dense / low rank, of FLOPs and of
time, and the share of the first that the second is. Median over {rounds} rounds in which all models and runtimes take turns (p10 - p90).
The goal is a share of 85 % in the best runtime. `stacked`: query, key and value on one right factor; `round_to 16`: ranks that are
multiples of 16, too.
"""


ONE_SHOT = """## The whole command `factorize`

Calibration by K-FAC on {examples} texts of 4 to 64 tokens, factors at density 0.16, the metric of 872 texts before and after, export and
its checks: seconds, and the peak of the process. Random weights; {threads} threads. Goals: 120 s for MiniLM, 360 s for BERT-base on two
cores; never more memory than the model and 1,024 MiB, next to what a tiny model takes (the libraries).
"""


VOCABULARY = """## Peak memory with a large vocabulary

Whole commands on texts of {length} tokens, {batch} texts in a training batch, {threads} thread: SmolLM2-135M (vocabulary
49,152) and a random Gemma 3 of two blocks (262,144). `fit` is SVD at density 0.5 with distillation, that of SmolLM2 with `--model.recompute true`. `loaded` is the dense and the compressed
model, `moments` AdamW's. Goal: both and 2.5 GB.
"""


def vocabulary() -> list[str]:
    """Return the table of peaks with a large vocabulary."""
    found = load("speed/vocabulary")
    rows = [
        [*r["name"].replace("lora", "LoRA (removed)").split("-"), *(f"{r[part] / 1e9:.2f}" for part in ("loaded", "moments", "peak", "goal")),
         held(r["peak"] <= r["goal"])]
        for r in found
    ]  # fmt: skip
    header = ["model", "command", "loaded, GB", "moments", "peak", "goal", ""]
    made = [VOCABULARY.format(**found[0]["setting"]), table(header, rows)] if found else []
    return [*made, origin(found[0], "speed/vocabulary", 1)] if found else []


def one_shot() -> list[str]:
    """Return the table of the whole command."""
    found = load("speed/one_shot")
    rows = [
        [r["name"], f"{r['seconds']:.0f}", f"{r['peak_mib']:,.0f}", f"{r['tiny']['peak_mib']:,.0f}", f"{r['net_mib']:,.0f}",
         f"{r['peak_mib'] - r['tiny']['peak_mib'] - r['net_mib']:,.0f}"]
        for r in found
    ]  # fmt: skip
    header = ["model", "seconds", "peak, MiB", "of a tiny model", "the model", "left: goal 1,024"]
    return (
        [
            ONE_SHOT.format(**found[0]["setting"]),
            table(header, rows),
            origin(found[0], "speed/one_shot", found[0]["setting"]["threads"]),
        ]
        if found
        else []
    )


def low_rank() -> list[str]:
    """Return the table of speed-ups over FLOP ratios."""
    lines = []
    results = {result["name"]: result for result in load("speed/low_rank")}
    for result in (result for result in results.values() if "times" in result):
        nets: dict[str, dict[str, Any]] = {}
        for row in result["times"]:
            nets.setdefault(row["net"], {})[row["runtime"]] = row
        runtimes = list(nets["dense"])
        rows = []
        for name, found in nets.items():
            if name == "dense":
                rows.append(["dense, ms", "", *(f"{found[r]['milliseconds']['median']:,.0f}" for r in runtimes), ""])
                continue
            ratio = found[runtimes[0]]["flop_ratio"]
            gains = {runtime: row["over_dense"] for runtime, row in found.items()}
            text = {
                r: f"{g['median']:.2f} ({g['low']:.2f} - {g['high']:.2f}), {g['median'] / ratio:.0%}"
                for r, g in gains.items()
            }
            shown, best = (
                [text.get(runtime, "") for runtime in runtimes],
                max(g["median"] for g in gains.values()) / ratio,
            )
            rows.append([name, f"{ratio:.2f}", *shown, "reached" if best >= 0.85 else "not reached"])
        head = ["net, density", "FLOPs, dense / low rank", *(f"{runtime}: time, share" for runtime in runtimes), "85 %"]
        lines += [LOW_RANK.format(**result), table(head, rows), origin(result, "speed/low_rank", result["threads"])]
    if "rest" in results:
        lines.append(
            f"The dense model without its matrices takes {spread(results['rest']['rest'])} of its time in PyTorch.\n"
        )
    return lines


def sections() -> list[str]:
    """Return the sections of the page: every ratio next to the paper's and the goal."""
    results = load("speed")
    steps = [r for r in results if r["name"].startswith("steps")]
    memory = [r for r in results if r["name"].startswith("memory")]

    def names(group: list[dict[str, Any]], prefix: str) -> list[str]:
        return [r["file"].removeprefix(prefix).replace("-cpu-", ", CPU, ").replace("-again", ", again") for r in group]

    goals = {"prune": ["1.15", "1.05"], "svd": ["", ""], "dense": ["", ""]}
    variants = list(dict.fromkeys(v for r in steps for v in r["ratio"]))
    dense = [median([t for pair in r["seconds"].values() for t in pair["dense"]]) for r in steps]
    rows = [["dense, seconds", "", "", *(f"{seconds:.2f}" for seconds in dense)]]
    for v in variants:
        shown = [spread(r["ratio"][v]) if v in r["ratio"] else "" for r in steps]
        rows.append([v + " (removed)" * ("checkpoint" in v or "concat" in v), *goals.get(v, ["", ""]), *shown])
    for mode in ("sequential", "concat", "accumulated"):
        halves = [
            [r["ratio"][f"mixed {mode}{h}"]["median"] for h in ("", " p=0") if f"mixed {mode}{h}" in r["ratio"]]
            for r in steps
        ]
        rows.append(
            [
                f"mixed {mode}, mean of both" + " (removed)" * (mode == "concat"),
                "1.3",
                "1.0",
                *(f"{sum(h) / 2:.2f}" if len(h) == 2 else "" for h in halves),
            ]
        )
    lines = [STEPS, table(["step", "paper", "goal", *names(steps, "steps-")], rows)]
    if memory:
        rows = [
            [
                v + " (removed)" * ("checkpoint" in v or "concat" in v),
                *(["1.4", "1.1"] if "mixed" in v else ["", ""]),
                *(f"{r['ratio'][v]:.2f} ({r['mib'][v]:,.0f} MiB)" if v in r["mib"] else "" for r in memory),
            ]
            for v in dict.fromkeys(v for r in memory for v in r["mib"])
        ]
        lines += [MEMORY, table(["process", "paper", "goal", *names(memory, "memory-")], rows)]
    lines.append("## The rest\n")
    for r in results:
        if r["name"].startswith("factorize"):
            shape = r["name"].removeprefix("factorize-")
            lines.append(f"- Factorizing all {r['matrices']} matrices of {shape}, weighted SVD in float64, {r['setting']['threads']} "
                         f"thread(s): {r['seconds']:.1f} s (goal for BERT-base on 2 cores: 60 s).")  # fmt: skip
        if r["name"] == "help":
            lines.append(
                f"- `python -m lit_compress --help` / `python -c 'import lightning.pytorch'`: {spread(r['ratio'])} (goal: 1.5)."
            )
    return [
        *lines,
        "",
        origin(steps[0], "speed", steps[0]["setting"]["threads"]),
        *low_rank(),
        *one_shot(),
        *vocabulary(),
    ]
