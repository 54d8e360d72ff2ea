"""Write benchmarks/README.md from the JSON under benchmarks/results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# LPAF's Table 2, SST-2 accuracy of BERT-base at 50 / 25 / 16 %, mean of 3 runs; the dense model has 92.7.
PAPER = {0.5: {"LPAF": 92.4, "SVD": 90.8}, 0.25: {"LPAF": 90.7, "SVD": 88.9}, 0.16: {"LPAF": 89.7, "SVD": 85.3}}
KEY = "val/accuracy"


def load(folder: str) -> list[dict[str, Any]]:
    """Return every result of a folder, with the name of its file."""
    paths = sorted((HERE / "results" / folder).glob("*.json"))
    return [{"file": path.stem, **json.loads(path.read_text())} for path in paths]


def stage(result: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the record of a stage."""
    return next(r for r in result["records"] if r["name"] == name)


def percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{100 * value:.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def best(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result with the best dev metric after retraining."""
    return max(results, key=lambda r: stage(r, "retrain")["metric"][KEY])


def lpaf_vs_svd() -> list[str]:
    """Compare the methods at each density, then list every run."""
    results = load("lpaf_vs_svd")
    search = [r for r in results if "signed" not in r["file"]]

    def density(result: dict[str, Any]) -> float:
        return result["config"]["model"]["init_args"]["density"]

    rows = []
    for d in PAPER:
        lpaf, svd = (best([r for r in search if r["method"] == m and density(r) == d]) for m in ("LPAF", "SVD"))
        same = best([r for r in search if r["method"] == "LPAF" and density(r) == d and "-v" not in r["file"]])
        before = [percent(stage(r, "retrain")["initial"][KEY]) for r in (lpaf, svd)]
        after = [stage(r, "retrain")["metric"][KEY] for r in (lpaf, svd)]
        rows.append(
            [
                f"{d:.2f}", f"{lpaf['compressed']['density']:.3f}", percent(stage(lpaf, "prune")["metric"][KEY]),
                *before, *(f"**{percent(a)}**" for a in after), f"{100 * (after[0] - after[1]):+.1f}",
                percent(stage(same, "retrain")["metric"][KEY]), f"{lpaf['ratios']['speedup']:.2f}x",
                f"{PAPER[d]['LPAF']} / {PAPER[d]['SVD']} ({PAPER[d]['LPAF'] - PAPER[d]['SVD']:+.1f})",
            ]
        )  # fmt: skip
    header = ["density", "measured", "pruned", "LPAF before", "SVD before", "LPAF", "SVD", "LPAF - SVD",
              "LPAF, v by default", "CPU speed-up", "paper: LPAF / SVD, BERT-base"]  # fmt: skip
    every = []
    for r in results:
        init = r["config"]["model"]["init_args"]
        prune = stage(r, "prune") if r["method"] == "LPAF" else None
        every.append(
            [
                r["method"], f"{density(r):.2f}", f"{init['retrain']['learning_rate']:g}",
                f"{init['prune']['score']}, {init['prune']['learning_rate']:g}" if prune else "",
                f"{r['stages']['prune']['density']:.2f}" if prune else "",
                f"{init['retrain']['p_init'] or 'default'}" if prune else "", percent(prune["metric"][KEY]) if prune else "",
                percent(stage(r, "retrain")["initial"][KEY]), percent(stage(r, "retrain")["metric"][KEY]),
                str(stage(r, "retrain")["steps"]),
            ]
        )  # fmt: skip
    any_run = results[0]
    dense = percent(stage(any_run, "dense")["metric"][KEY])
    return [
        "## LPAF beside truncated SVD + retraining, MiniLM-L6-H384 on SST-2",
        f"Dev accuracy in % (872 sentences: one is 0.11, a standard error about 1.2). Teacher: {dense}, fine-tuned on 12,000",
        "training phrases for 2 epochs; pruning and retraining: 8,000 phrases, 2 epochs each (500 updates after the",
        "factorization for both methods), batch 32, bf16-mixed, seed 42; learning rates 1e-4 and 3e-4 tried for both, the",
        "better shown. `before` is right after the factorization.",
        "",
        table(header, rows),
        "",
        "Every run:",
        "",
        table(["method", "density", "rate", "score, pruning rate", "v", "p_init", "pruned", "before", "after", "updates"], every),
        "",
        f"Made by `python benchmarks/lpaf_vs_svd.py` at commit {any_run['commit']} on {any_run['hardware']['cpu']},",
        f"{any_run['hardware']['cores']} cores, torch {any_run['versions']['torch']}.",
        "",
    ]  # fmt: skip


def speed() -> list[str]:
    """Put every ratio beside the paper's and the goal."""
    results = {r["file"]: r for r in load("speed")}
    if not results:
        return []
    goals = {"prune": ("1.15x", "1.05x"), "svd": ("-", "-")}
    lines = ["## Time of a training step / a dense fine-tuning step", ""]
    lines += ["No distillation on either side, batch 32 x 128 tokens, density 0.25. Median over interleaved rounds (smallest - largest).",
              "`p=0` is the second half of LPAF's retraining, without it p stands at p_init / 2; their mean is the whole training's.", ""]  # fmt: skip
    steps = [r for name, r in results.items() if name.startswith("steps")]
    variants = [v for v in steps[0]["ratio"] if v != "dense"]

    def show(ratio: dict[str, float]) -> str:
        return f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"

    names = [f"{r['name'].removeprefix('steps-')}, {r['setting']['device']} {r['setting']['precision']}" for r in steps]
    rows = [[v, *goals.get(v, ("1.3x", "1.0x")), *(show(r["ratio"][v]) for r in steps)] for v in variants]
    for mode in ("sequential", "checkpoint", "concat"):
        halves = [[r["ratio"][f"mixed {mode}{h}"]["median"] for h in ("", " p=0")] for r in steps]
        rows.append([f"mixed {mode}, whole training", "1.3x", "1.0x", *(f"{sum(h) / 2:.2f}" for h in halves)])
    dense = [
        "dense step, seconds",
        "",
        "",
        *(f"{sorted(r['seconds']['dense'])[len(r['seconds']['dense']) // 2]:.2f}" for r in steps),
    ]
    lines += [table(["step", "paper", "goal", *names], [dense, *rows]), ""]
    memory = [r for name, r in results.items() if name.startswith("memory")]
    if memory:
        lines += [
            "## Peak memory / dense fine-tuning",
            "",
            "Peak resident size of a whole process that makes two steps.",
            "",
        ]
        names = [
            f"{r['name'].removeprefix('memory-')}, {r['setting']['device']} {r['setting']['precision']}" for r in memory
        ]
        rows = [[v, "1.4x" if "mixed" in v else "", "1.1x" if "mixed" in v else "",
                 *(f"{r['ratio'][v]:.2f} ({r['mib'][v]:,.0f} MiB)" for r in memory)] for v in memory[0]["mib"]]  # fmt: skip
        lines += [table(["process", "paper", "goal", *names], rows), ""]
    lines += ["## The rest", ""]
    for r in results.values():
        if r["name"].startswith("factorize"):
            lines += [f"- Factorizing all {r['matrices']} matrices of {r['name'].removeprefix('factorize-')} (weighted SVD, float64), "
                      f"{r['setting']['threads']} threads: {r['seconds']:.1f} s (goal for BERT-base: 60 s)."]  # fmt: skip
        if r["name"] == "help":
            lines += [
                f"- `python -m lit_compress --help` / `python -c 'import lightning.pytorch'`: {show(r['ratio'])} (goal: 1.5)."
            ]
    first = steps[0]
    lines += ["", f"Made by `python benchmarks/speed.py` at commit {first['commit']} on {first['hardware']['cpu']}, "
              f"{first['setting']['threads']} threads, torch {first['versions']['torch']}. No GPU was measured.", ""]  # fmt: skip
    return lines


def main() -> None:
    """Write the page; what the numbers mean is in findings.md."""
    head = ["# Benchmarks", "", "Generated by `python benchmarks/tables.py` from `results/*/*.json`, each of which holds config, commit,",
            "versions and hardware. Numbers that disappoint stay.", "", (HERE / "findings.md").read_text().strip(), ""]  # fmt: skip
    (HERE / "README.md").write_text("\n".join([*head, *lpaf_vs_svd(), *speed()]).rstrip() + "\n")


if __name__ == "__main__":
    main()
