"""Other estimates of benchmarks/second_order: their sums by loops, and all of it on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_benchmarks_kprune import write_teacher
from tiny import make_batch, make_net

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.second_order import estimates, untrained, untrained_tables
from benchmarks.second_order.estimates import EveryToken, OtherFactors, Tokens, factors, product, quadratic, rescaled
from lit_compress.calibration.moments import Moments
from lit_compress.calibration.statistics import whole


@pytest.fixture
def tokens() -> Tokens:
    torch.manual_seed(0)
    examples = torch.tensor([0, 0, 0, 1, 2, 2])
    inputs = torch.cat([torch.randn(6, 3), torch.ones(6, 1)], 1).double()
    return Tokens(inputs, torch.randn(6, 5).double(), examples, {"a": 2, "b": 3})


def of_examples(tokens: Tokens) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(tokens.inputs[tokens.examples == e], tokens.gradients[tokens.examples == e]) for e in range(3)]


def test_the_moments_are_means_over_examples(tokens: Tokens) -> None:
    expected = {name: (torch.zeros(4, 4).double(), torch.zeros(5, 5).double()) for name in ("length", "reduce")}
    for inputs, gradients in of_examples(tokens):
        for x, d in zip(inputs, gradients, strict=True):
            expected["length"][0].add_(torch.outer(x, x) / len(inputs) / 3)
            expected["length"][1].add_(torch.outer(d, d) / 3)
        expected["reduce"][0].add_(torch.outer(inputs.mean(0), inputs.mean(0)) / 3)
        expected["reduce"][1].add_(torch.outer(gradients.sum(0), gradients.sum(0)) / 3)
    for name, pair in expected.items():
        assert all(torch.allclose(a, b) for a, b in zip(product(name, tokens), pair, strict=True)), name


def test_the_nearest_product_is_nearer_than_kfac(tokens: Tokens) -> None:
    fisher = torch.zeros(20, 20).double()
    sandwich = torch.zeros(5, 5).double()
    middle = torch.randn(4, 4).double()
    middle = middle @ middle.T
    for inputs, gradients in of_examples(tokens):
        each = torch.stack([torch.outer(d, x) for x, d in zip(inputs, gradients, strict=True)]).sum(0)
        fisher += torch.outer(each.flatten(), each.flatten()) / 3
        sandwich += each @ middle @ each.T / 3
    found = quadratic(tokens.gradients, tokens.inputs @ middle, tokens.inputs, tokens.examples)
    assert torch.allclose(found, sandwich)

    def distance(name: str) -> float:
        inputs, gradients = product(name, tokens)
        return float((fisher - torch.kron(gradients, inputs)).norm())

    vectors = fisher.view(5, 4, 5, 4).transpose(1, 2).reshape(25, 16)  # Van Loan and Pitsianis: the first singular pair
    best = float(torch.linalg.svdvals(vectors)[1:].norm())
    assert best <= distance("nearest") < 1.02 * best and distance("kfac") > 1.2 * best


def test_the_tokens_are_those_of_kfac() -> None:
    net = make_net("bert", "sst2").eval()
    batches = [make_batch(5, 9, seed) | {"index": 5 * seed + torch.arange(5)} for seed in range(2)]
    expected = whole(net, Moments(labels="drawn"), batches, "classification")
    kept = whole(net, EveryToken(labels="drawn"), batches, "classification")
    found = {name: own for tokens in kept.values() for name, own in factors("kfac", tokens).items()}
    assert found.keys() == expected.keys() and len(kept) < len(found)
    sites = ["bert.encoder.layer.1.output.dense"]
    other = whole(net, OtherFactors(labels="drawn", sites=sites, variant="reduce"), batches, "classification")
    group = next(tokens for tokens in kept.values() if sites[0] in tokens.sites)
    expected_one = factors("reduce", group)[sites[0]]
    assert list(other) == sites and torch.equal(other[sites[0]].inputs(), expected_one.inputs())
    assert torch.allclose(other[sites[0]].gradients(), expected_one.gradients(), rtol=1e-4)
    for name, own in found.items():
        assert torch.allclose(own.mean, expected[name].mean, atol=1e-5), name
        for part in ("inputs", "gradients"):
            one, other = getattr(own, part)(), getattr(expected[name], part)()
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max())), (name, part)


def test_costs_add_up_to_what_was_measured() -> None:
    costs = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0])
    found = rescaled(costs, [(2, 0.4), (4, 0.3), (5, 1.0)])  # the second is below the first
    assert torch.allclose(found.cumsum(0) / 2, torch.tensor([0.1, 0.4, 0.4, 0.4, 1.0]).double(), atol=1e-6)
    assert torch.equal(costs, torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0]))


def test_the_rows_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script on a tiny model; what is made is not made again."""
    words = write_teacher(tmp_path)
    monkeypatch.setattr(untrained, "HELD_OUT", {"sst2": 20})
    ladders, once = [], estimates.rescaled

    def keep(costs: torch.Tensor, levels: list[tuple[int, float]]) -> torch.Tensor:
        ladders.append((len(costs), levels))
        return once(costs, levels)

    monkeypatch.setattr(estimates, "rescaled", keep)
    line = ["estimates", *words, "--densities", "0.5", "--texts", "20", "--ladder_texts", "8"]
    monkeypatch.setattr(sys, "argv", line)
    estimates.main()
    config = json.loads((tmp_path / "teachers" / "sst2" / "config.json").read_text())
    assert len(ladders) == 2 * config["num_hidden_layers"]
    for steps, levels in ladders:  # each sub-layer alone, until it has no units
        assert levels[-1][0] == steps and 0 < levels[0][1] < levels[-1][1]
    made = list(common.load(tmp_path / "results"))
    pairs = {(result["variant"], result["removes"]) for result in made}
    assert pairs == {(v, r) for v in estimates.VARIANTS for r in untrained.REMOVES} - {("ladder", "components")}
    for result in made:
        row = result["rows"]["0.5"]
        assert row["measured"] > 0 and row["estimated"] > 0 and 0 <= row["metric"] <= 1 and result["held_out"]
    monkeypatch.setattr(estimates.Estimates, "result", None)
    estimates.main()

    monkeypatch.setattr(untrained_tables, "load", lambda script: made if script.endswith("estimates") else [])
    _, shown, _ = untrained_tables.estimates()
    assert [len(line.split("|")) for line in shown.splitlines()] == [2 + 3 + len(estimates.VARIANTS)] * 4
