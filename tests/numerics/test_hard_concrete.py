"""Hard-concrete gates and the size they leave, against loops, draws and enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lit_compress.layers.training.gated import HardConcrete
from lit_compress.numerics.hard_concrete import (
    EPS,
    Size,
    Weights,
    fit_budget,
    keep_best,
    kept_units,
    probability,
    sample,
    soft,
)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sample_is_the_formula() -> None:
    a, u = draw(3, 5, scale=3), torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    for alpha, uniform, z in zip(
        a.flatten().tolist(), u.flatten().tolist(), sample(a, u).flatten().tolist(), strict=True
    ):
        s = sigmoid((math.log(uniform) - math.log(1 - uniform) + alpha) / (2 / 3))
        assert z == pytest.approx(min(1.0, max(0.0, 1.2 * s - 0.1)), abs=1e-5)
    assert sample(a, torch.rand(7, 3, 5)).shape == (7, 3, 5)  # one log_alpha, several draws
    ends = sample(torch.zeros(2), torch.tensor([0.0, 1.0]))
    assert ends.tolist() == [0.0, 1.0]


def test_probability_against_draws() -> None:
    """Monte-Carlo of P(z > 0), and the published shift of 1.5986."""
    a = torch.linspace(-4, 4, 9)
    found = (sample(a, torch.rand(100_000, 9, generator=torch.Generator().manual_seed(0))) > 0).float().mean(0)
    assert torch.allclose(found, probability(a), atol=5e-3)
    assert float(probability(torch.zeros(1))) == pytest.approx(sigmoid(1.5986), abs=1e-5)
    assert probability(torch.tensor([-99.0, 99.0])).tolist() == pytest.approx([EPS, 1 - EPS], abs=1e-7)
    assert soft(a).tolist() == pytest.approx([sigmoid(1.2 * x) for x in a.tolist()])


def test_gradient_reaches_log_alpha() -> None:
    a = torch.zeros(200, requires_grad=True)
    sample(a, torch.rand(200, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert a.grad is not None and (a.grad >= 0).all() and (a.grad > 0).float().mean() > 0.5
    b = torch.zeros(3, requires_grad=True)
    probability(b).sum().backward()
    p = sigmoid(1.5986)
    assert b.grad is not None and b.grad.tolist() == pytest.approx([p * (1 - p)] * 3, rel=1e-4)


def test_kept_units_rounds_halves_up() -> None:
    """k = floor(sum P + 1/2) per group; a unit of its own stays iff P >= 1/2."""
    a = draw(6, 9, scale=2)
    for row, kept in zip(a.tolist(), kept_units(a).tolist(), strict=True):
        assert kept == math.floor(sum(sigmoid(x + 1.59859) for x in row) + 0.5)
    alone = torch.tensor([[-1.7], [-1.5]])
    assert kept_units(alone).tolist() == [0, 1]
    assert kept_units(torch.full((1, 4), -20.0), least=1).tolist() == [1]
    assert kept_units(a, offset=50.0).tolist() == [9] * 6 and kept_units(a, offset=-50.0).tolist() == [0] * 6


def test_keep_best() -> None:
    a = torch.tensor([[0.1, 3.0, -2.0, 3.0], [5.0, 4.0, 3.0, 2.0]])
    mask = keep_best(a, torch.tensor([2, 0]))
    assert mask.tolist() == [[False, True, False, True], [False] * 4]
    assert keep_best(a, torch.tensor([1, 4])).tolist() == [[False, True, False, False], [True] * 4]  # ties: the first


SHAPES = {"hidden": (1, 3), "heads": (2, 2), "attention": (2, 1)}
PARTS: list[Weights] = [
    *((4, ("hidden", 0), ("heads", layer), ("attention", layer)) for layer in range(2)),
    (7, ("hidden", 0)),
    (5,),
]


def naive_size(kept: dict[str, list[int]]) -> float:
    total = 5 + 7 * kept["hidden"][0]
    for layer in range(2):
        total += 4 * kept["hidden"][0] * kept["heads"][layer] * kept["attention"][layer]
    return total


def test_size_counts() -> None:
    size = Size(PARTS, SHAPES)
    assert size.total == naive_size({"hidden": [3], "heads": [2, 2], "attention": [1, 1]}) == 5 + 21 + 48
    kept = {"hidden": [2], "heads": [1, 2], "attention": [0, 1]}
    assert size.count({name: torch.tensor(value) for name, value in kept.items()}) == naive_size(kept)
    masks = {name: keep_best(draw(*SHAPES[name]), torch.tensor(value)) for name, value in kept.items()}
    assert size.count(masks) == naive_size(kept)


def test_expected_size_is_enumeration() -> None:
    """Sum over all 2^9 settings of independent gates."""
    size, a = Size(PARTS, SHAPES), {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    p = torch.cat([probability(a[name]).flatten() for name in SHAPES]).tolist()
    expected = 0.0
    for setting in itertools.product((0, 1), repeat=len(p)):
        chance = math.prod(q if on else 1 - q for q, on in zip(p, setting, strict=True))
        h, e, m = setting[:3], setting[3:7], setting[7:]
        expected += chance * naive_size({"hidden": [sum(h)], "heads": [sum(e[:2]), sum(e[2:])], "attention": list(m)})
    assert float(size.density(a)) == pytest.approx(expected / size.total, rel=1e-5)


FINE = {"hidden": (1, 8), "heads": (3, 4), "neurons": (3, 40)}
FINE_PARTS = [
    part for i in range(3) for part in ((16, ("hidden", 0), ("heads", i)), (2, ("hidden", 0), ("neurons", i)))
]


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.4, 0.77, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 1e5])
def test_fit_budget(fraction: float, scale: float) -> None:
    """Never above the budget, less than a neuron below; the best units of every group; least units stay."""
    size = Size(FINE_PARTS, FINE)
    a = {name: draw(*shape, seed=i, scale=scale) for i, (name, shape) in enumerate(FINE.items())}
    budget = round(fraction * size.total)
    masks = fit_budget(a, size, budget, {"hidden": 1}, "neurons")
    count, hidden = size.count(masks), int(masks["hidden"].sum())
    assert hidden >= 1 and count <= budget
    assert budget - count < 2 * hidden or masks["neurons"].all()
    for name, mask in masks.items():
        assert torch.equal(mask, keep_best(a[name], mask.sum(1)))


def test_layer() -> None:
    torch.manual_seed(0)
    gate = HardConcrete(3, 7, mean=0.5, least=1)
    assert gate.log_alpha.shape == (3, 7) and torch.allclose(gate.log_alpha, torch.full((3, 7), 0.5), atol=0.05)
    assert torch.equal(HardConcrete(3, 7, 0.5).log_alpha, gate.log_alpha)  # the same on every rank
    first, second = gate.sample(), gate.sample()
    assert not torch.equal(first, second) and first.requires_grad
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[1, 2] = True
    assert gate.deterministic(mask).nonzero().tolist() == [[1, 2]] and not gate.deterministic(mask).requires_grad
    assert float(gate.deterministic(mask)[1, 2]) == pytest.approx(sigmoid(1.2 * gate.log_alpha[1, 2].item()))


def test_fit_budget_opens_one_of_two_layers() -> None:
    """Two layers that learned the same close at the same offset; one of them fits."""
    shapes = {"ffn": (2, 1), "neurons": (2, 10)}
    size = Size([(10, ("neurons", layer), ("ffn", layer)) for layer in range(2)], shapes)
    a = {"ffn": torch.tensor([[-3.0], [-3.0]]), "neurons": torch.full((2, 10), 4.0)}
    masks = fit_budget(a, size, 120, {}, "neurons")
    assert masks["ffn"].flatten().tolist() == [True, False] and size.count(masks) == 100


def test_units_of_infinite_alpha_do_not_depend_on_the_budget():
    shapes = {"layers": (1, 3), "neurons": (1, 10)}
    size = Size([(10, ("layers", 0)), (1, ("neurons", 0))], shapes)
    alphas = {"layers": torch.tensor([[torch.inf, -torch.inf, -torch.inf]]), "neurons": torch.linspace(-1, 1, 10)[None]}
    for budget, neurons in ((13, 3), (40, 10)):
        masks = fit_budget(alphas, size, budget, {}, "neurons")
        assert masks["layers"].tolist() == [[True, False, False]] and int(masks["neurons"].sum()) == neurons


def test_fit_budget_in_multiples() -> None:
    """Kept are multiples, or a number below the smallest; the budget holds, and no further step would fit."""
    size = Size(FINE_PARTS, FINE)
    a = {name: draw(*shape, seed=i, scale=2.0) for i, (name, shape) in enumerate(FINE.items())}
    for share in (0.1, 0.4, 0.8):
        budget = int(share * size.total)
        masks = fit_budget(a, size, budget, {"hidden": 1}, "neurons", {"neurons": 4, "hidden": 2})
        kept = {name: mask.sum(1) for name, mask in masks.items()}
        assert size.count(masks) <= budget
        for name, step in (("neurons", 4), ("hidden", 2)):
            assert all(n < step or n % step == 0 or n == a[name].shape[1] for n in kept[name].tolist())
        for group, n in enumerate(kept["neurons"].tolist()):
            more = kept["neurons"].clone()
            more[group] = min(n - n % 4 + 4, a["neurons"].shape[1])
            assert (
                n == more[group]
                or size.count(kept | {"neurons": more}) > budget
                or size.count(kept) == (size.count(kept | {"neurons": more}))
            )
