"""The papers' claims: the verdicts beside naive formulas; nothing undecided is ever held."""

import json
from statistics import NormalDist, variance

import pytest
from scipy import stats

from benchmarks.comparison.claims import FILE, ClaimedResult, Value, decided, difference, evaluate_claims, read_claims
from lit_compress.cli.recipes import COMPARISONS, resolve_config
from lit_compress.run.comparison import budget_name, read_comparison
from lit_compress.utils.files import read_yaml


def results(label, values, error=0.01, budget="density=0.25", first_seed=1, **more):
    return [
        ClaimedResult(label, budget, seed, {"metric": Value(value, error), "dense": Value(0.9, error), **more})
        for seed, value in enumerate(values, start=first_seed)
    ]


def verdict(found, task="sst2", less_is_better=False, **claim):
    [entry] = evaluate_claims(read_claims([{"text": "t", **claim}]), found, task, less_is_better)
    assert set(entry) == {"text", "verdict", "test", "detail", "paper"}
    return entry["verdict"]


def test_the_same_seeds_are_paired_others_are_not():
    left, right = [0.80, 0.84, 0.83, 0.85], [0.79, 0.82, 0.80, 0.83]
    sides = [{s: Value(v) for s, v in enumerate(side)} for side in (left, right)]
    p, test, gap = difference(*sides)
    assert p == pytest.approx(stats.ttest_rel(left, right).pvalue) and "paired" in test
    assert gap == pytest.approx(0.02)
    other = {seed + 10: score for seed, score in sides[1].items()}
    p, test, _ = difference(sides[0], other)
    parts = [variance(side) / 4 for side in (left, right)]
    freedom = 3 * sum(parts) ** 2 / (parts[0] ** 2 + parts[1] ** 2)
    assert p == pytest.approx(2 * stats.t.sf(0.02 / sum(parts) ** 0.5, freedom)) and "Welch" in test


def test_one_seed_is_compared_with_the_standard_errors():
    p, _, _ = difference({1: Value(0.86, 0.012)}, {1: Value(0.82, 0.013)})
    assert p == pytest.approx(2 * (1 - NormalDist().cdf(0.04 / (0.012**2 + 0.013**2) ** 0.5)))
    assert verdict(results("A", [0.86], 0.012) + results("B", [0.85], 0.012), above="A", below="B") == "within noise"
    assert verdict(results("A", [0.90], 0.012) + results("B", [0.80], 0.012), above="A", below="B") == "held"
    assert verdict(results("A", [0.80], 0.012) + results("B", [0.90], 0.012), above="A", below="B") == "not held"


def test_many_claims_are_corrected_together():
    """One of 20 differences has p 0.01: held alone, within noise among 20. Exact values count for nothing."""
    apart = 0.01 * 2**0.5 * NormalDist().inv_cdf(1 - 0.01 / 2)
    found = results("A", [0.8 + apart], fewer_flops=Value(5.0, 0.0)) + results("B", [0.8])
    claims = [{"text": "t", "above": "A", "below": "B"}]
    exact = [{"text": "exact", "above": "A", "below": "A", "value": "fewer_flops", "by": -1.0}]
    missing = [{"text": "missing", "above": "A", "below": f"no {i}"} for i in range(9)]
    other = [{"text": "other", "above": "A", "below": "C", "by": 0.01}] * 19

    def entries(rows):
        return evaluate_claims(read_claims(rows), found + results("C", [0.79 + apart]), "sst2")

    alone = entries(claims + exact + missing)
    assert [entry["verdict"] for entry in alone] == ["held", "held", *["not measured"] * 9]
    assert alone[0]["detail"].endswith("p 0.010")
    many = entries(claims + exact + other)
    assert many[0]["verdict"] == "within noise" and many[1]["verdict"] == "held"
    assert many[0]["detail"].endswith("p 0.010, 0.200 corrected for 20 comparisons")


def test_what_cannot_be_decided_is_never_held():
    same = results("A", [0.9, 0.9, 0.9], 0.02) + results("B", [0.88, 0.88, 0.88], 0.02)
    assert verdict(same, above="A", below="B") == "within noise"  # three equal seeds are one
    assert verdict(results("A", [0.9], None) + results("B", [0.1], None), above="A", below="B") == "within noise"
    assert verdict(results("A", [0.9, 0.8]) + results("B", [0.7, 0.75]), above="A", below="B") == "within noise"
    assert verdict(results("A", [0.9]), above="A", below="B") == "not measured"
    assert verdict(results("A", [0.9]) + results("B", [0.1]), above="A", below="B", tasks=["rte"]) == "not measured"
    held = results("A", [0.9]) + results("B", [0.1])
    assert verdict(held, above="A", below="B", budgets=["density=0.25", "density=0.1"]) == "not measured"


def test_a_claim_without_budgets_is_about_those_of_its_methods():
    """`Layers` has budgets of its own; because of them no other claim was decided."""
    found = results("A", [0.9]) + results("B", [0.1]) + results("C", [0.5], budget="density=0.5")
    assert verdict(found, above="A", below="B") == "held"
    found += results("A", [0.9], budget="density=0.5")  # what is missing at a budget of its own stays missing
    assert verdict(found, above="A", below="B") == "not measured"
    assert verdict(found, above="A", below="dense", times=0.5) == "held"


def test_distances_ratios_orders_and_other_scores():
    found = results("A", [0.9]) + results("B", [0.8]) + results("C", [0.5])
    assert verdict(found, above="A", below="B", by=0.01) == "held"
    assert verdict(found, above="A", below="B", by=0.09) == "within noise"
    assert verdict(found, above=["A", "B", "C"]) == "held"
    assert verdict(found, above=["A", "C", "B"]) == "not held"
    assert verdict(found, above="B", below="dense", times=0.8) == "held"  # 0.8 and 0.72
    assert verdict(found, above="C", below="dense", times=0.8) == "not held"
    assert verdict(found, less_is_better=True, above="C", below="A") == "held"  # e.g. perplexity
    fast = results("A", [0.9], speedup=Value(4.0, 0.1), fewer_flops=Value(5.0, 0.0))
    assert verdict(fast, above="A", below="A", value="speedup", below_value="fewer_flops", times=0.7) == "held"
    assert verdict(fast, above="A", below="A", value="speedup", below_value="fewer_flops", times=0.9) == "not held"


def test_the_file_of_claims_is_about_the_shipped_comparison():
    claims = read_claims(read_yaml("claims", FILE), budget_name)
    made = read_comparison(resolve_config("compare_sst2.yaml", None, COMPARISONS), "compare_sst2.yaml")
    assert len(claims) == 25 and all(claim.paper for claim in claims)
    labels = {entry.label for entry in made.entries()} | {"dense", "SP3, identity"}  # the last of an earlier version
    assert {name for claim in claims for pair in claim.pairs for name in pair} <= labels
    assert {budget for claim in claims for budget in claim.budgets} == set(
        map(budget_name, [0.5, 0.25, 0.16, 0.1, 0.06])
    )


def report(metric, **more):
    net = {"metric": metric, "interval": [metric - 0.01, metric + 0.01], "density": 0.25}
    return {"metric": {"name": "accuracy", "mode": "max", "rows": 4}, "compressed": net, "dense": net,
            "ratios": {"flops": 0.5, "params": {"total": 0.5}, "bytes": 0.5}, **more}  # fmt: skip


def test_claims_are_tested_on_the_finished_runs_of_a_comparison(tmp_path):
    cells = []
    for label, status, metric in (("A", "done", 0.9), ("B", "done", 0.5), ("C", "missing", 0.0)):
        cells.append({"label": label, "budget": "density=0.25", "seed": 1, "status": status, "run": label})
        (tmp_path / label).mkdir()
        (tmp_path / label / "report.json").write_text(json.dumps(report(metric)))
    found = {"cells": cells, "task": "sst2", "metric": {"name": "accuracy", "mode": "max"}}
    (tmp_path / "compare.json").write_text(json.dumps(found))
    (tmp_path / "claims.yaml").write_text(
        "- {text: first, above: A, below: B, budgets: [0.25]}\n- {text: second, above: B, below: C}\n"
    )
    verdicts = [entry["verdict"] for entry in decided(tmp_path, tmp_path / "claims.yaml")]
    assert verdicts == ["held", "not measured"]
