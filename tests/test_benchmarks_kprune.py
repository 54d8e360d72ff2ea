"""K-prune of benchmarks/second_order: its sums by loops, and all of it on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import WORDS, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.second_order import untrained, untrained_tables
from benchmarks.second_order.kprune import fitted, highest_within, predictive, representational


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_predictive_knowledge_is_that_of_single_examples(classes: int) -> None:
    torch.manual_seed(0)
    weights, temperature = torch.randn(4, 5, classes), 2.0  # examples, units
    masks = torch.ones(4, 5, requires_grad=True)

    def outputs(mask: torch.Tensor, example: int) -> torch.Tensor:
        return (mask @ weights[example]).tanh() * 3

    (found,) = predictive(torch.stack([outputs(masks[x], x) for x in range(4)]), [masks], temperature)
    for unit in range(5):
        total = 0.0
        for x in range(4):
            z = outputs(torch.ones(5), x)
            step = torch.eye(5)[unit] * 1e-3
            slope = (outputs(1 + step, x) - outputs(1 - step, x)) / 2e-3
            if classes == 1:
                total += 0.5 * float(slope[0]) ** 2
                continue
            p = (z / temperature).softmax(0)
            for y in range(classes):  # d log p_y / d m = (slope_y - sum_k p_k slope_k) / g
                score = float(slope[y] - p @ slope) / temperature
                total += 0.5 * temperature**2 * float(p[y]) * score**2
        assert float(found[unit]) == pytest.approx(total, rel=2e-2)


@pytest.mark.parametrize("width", [1, 3])
def test_representational_knowledge_is_the_output_of_a_unit(width: int) -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(4, 2 * width), torch.randn(7, 2 * width)
    for unit, value in enumerate(representational(weight, inputs, width)):
        total = 0.0
        for token in inputs:
            own = torch.zeros_like(token)
            own[unit * width : (unit + 1) * width] = token[unit * width : (unit + 1) * width]
            total += float((weight @ own).square().sum())
        assert float(value) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("budget", [0.0, 1.0, 9.0, 10.0, 14.0, 100.0])
def test_the_threshold_is_the_lowest_that_meets_the_budget(budget: float) -> None:
    scores, costs = torch.tensor([3.0, 1.0, 5.0, 4.0]), torch.tensor([8.0, 1.0, 1.0, 4.0])
    best = torch.zeros(4, dtype=torch.bool)
    for threshold in [*scores.tolist(), 6.0]:
        above = scores >= threshold
        if float(costs[above].sum()) <= budget and above.sum() > best.sum():
            best = above
    assert torch.equal(highest_within(scores, costs, budget), best)


def test_the_fit_is_that_of_all_tokens() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    columns = torch.tensor([0, 2, 5])
    found = fitted(inputs.T @ inputs, inputs.T @ targets, columns)
    assert torch.allclose(found, torch.linalg.lstsq(inputs[:, columns], targets).solution, atol=1e-6)


def write_teacher(folder: Path) -> list[str]:
    """Write a tiny teacher and its data; return the options of the scripts that read them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_model(folder / "teachers" / "sst2", "bert", "sst2")
    (folder / "data" / "sst2").mkdir(parents=True)
    for split, count in (("train", 60), ("validation", 20)):
        rows = {
            "sentence": [" ".join(WORDS[i % 7 : i % 7 + 9]) for i in range(count)],
            "label": [i % 2 for i in range(count)],
        }
        pq.write_table(pa.table(rows), folder / "data" / "sst2" / f"{split}.parquet")
    folders = [word for name in ("teachers", "data", "work", "results") for word in (f"--{name}", str(folder / name))]
    return [*folders, "--tasks", "sst2"]


def test_the_rows_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script on a tiny model; what is made is not made again."""
    words = write_teacher(tmp_path)
    monkeypatch.setattr(untrained, "HELD_OUT", {"sst2": 20})
    monkeypatch.setattr(untrained, "STEPS", {"refined": 1, "distilled": 1, "longer": 2})
    monkeypatch.setattr(sys, "argv", ["untrained", *words, "--densities", "0.5"])
    untrained.main()
    made = {result["name"]: result for result in common.load(tmp_path / "results")}
    after = {f"sst2-{cell}-0.5{end}" for cell in untrained.REMOVES for end in ("", *(f"-{a}" for a in untrained.STEPS))}
    assert set(made) == {"sst2-dense", "sst2-kprune-0.5"} | after
    assert all(r["dev"]["val/rows"] == r["held_out"]["val/rows"] == 20 and r["file_density"] <= 0.51
               for name, r in made.items() if name != "sst2-dense")  # fmt: skip
    monkeypatch.setattr(untrained.Untrained, "store", None)
    untrained.main()

    monkeypatch.setattr(
        untrained_tables, "load", lambda script: list(made.values()) if script.endswith("untrained") else []
    )
    _, shown, _ = untrained_tables.untrained()
    assert [line.split(" | ")[1] for line in shown.splitlines()[2:]] == [
        *("K-FAC, heads and neurons", "K-prune", "K-FAC, components"),
        *["K-FAC, heads and neurons", "K-FAC, components"] * 3,
    ]  # fmt: skip
