"""The rank rules against hand counts, the global budget against enumeration."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import make_net

from lit_compress.models.accounting import stored_density
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.numerics.ranks import (
    allocate,
    break_even_rank,
    largest_rank,
    rank_for_density,
    rank_for_ratio,
    stored,
)
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize(("rank", "sites"), [(260, 43_130_880), (253, 41_969_664), (130, 21_565_440), (80, 13_271_040)])
def test_bert_base_fixed_ranks(bert_base, rank, sites):
    """Invariant 9: the published sizes."""
    net = copy.deepcopy(bert_base)
    biases = sum(net.get_submodule(site.name).bias.numel() for site in find_sites(net))
    ranks = RankRule(0.25, rank).allocate(net)
    factorize(net, ranks, None)
    layers = [net.get_submodule(name) for name in ranks]
    assert sum(p.numel() for layer in layers for p in layer.parameters()) == sites + biases
    assert len(ranks) == 72


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"density": 0.5, "rank": 22}, "rank: 22 makes no matrix smaller; the largest rank that does is 21"),
        ({"rank_ratio": 0.9}, "rank_ratio: 0.9 makes no matrix smaller"),
        ({"rank_ratio": 1.5}, "rank_ratio: 1.5 is not in"),
        ({"rank": 0}, "rank: 0"),
    ],
)
def test_what_saves_nothing_is_one_line(rule, words):
    with pytest.raises(UserError, match=words):
        RankRule(**rule).allocate(make_net())  # 32 x 64: break-even 21.3


@pytest.mark.parametrize("rule", [RankRule(1.0), RankRule(0.5, rank_ratio=1.0), RankRule(1.0, allocation="global")])
def test_keeping_all_factorizes_nothing(rule):
    assert rule.keeps_all and rule.allocate(make_net()) == {}


def test_largest_rank_is_the_last_that_saves():
    for out, inner in [(4, 4), (5, 7), (32, 64), (768, 768)]:
        rank = largest_rank(out, inner)
        assert rank * (out + inner) < out * inner <= (rank + 1) * (out + inner)
        assert stored(out, inner, rank) == rank * (out + inner) and stored(out, inner, rank + 1) == out * inner


def test_stacked_matrices_are_one_shape():
    """Three matrices on one right factor: a component costs the sum of their outs and the inputs once."""
    sigma = {"qkv": torch.tensor([4.0, 3.0, 2.0, 1.0]), "o": torch.tensor([3.9, 2.9, 1.9, 0.9])}
    shapes = {"qkv": (30, 10), "o": (10, 10)}
    # 16, 9 | 4, 1 over 40 beside 15.21, 8.41, 3.61 | 0.81 over 20
    assert allocate(sigma, shapes, 40 * 2 + 20 * 3) == {"qkv": 2, "o": 3}


@pytest.mark.parametrize("budget", [30.0, 33.0, 50.0, 64.0, 75.0])
def test_worth_decides(budget):
    """One threshold on energy per price; where factors are larger than the dense matrix it stays, and is counted."""
    shapes = {"a": (5, 6), "b": (9, 4), "c": (3, 3)}
    generator, scale = torch.Generator().manual_seed(0), {"a": 3.0, "b": 1.0, "c": 0.2}
    sigma = {n: x * torch.rand(min(shapes[n]), generator=generator).double().sort(descending=True).values
             for n, x in scale.items()}  # fmt: skip
    ranks = allocate(sigma, shapes, budget)
    assert all(rank <= largest_rank(*shapes[n]) for n, rank in ranks.items())
    assert all(len(sigma[n]) > largest_rank(*shapes[n]) for n in sigma if n not in ranks)
    assert sum(stored(*shapes[n], ranks.get(n, len(s))) for n, s in sigma.items()) <= budget
    worth = {n: v**2 / sum(shapes[n]) for n, v in sigma.items()}
    kept = [float(worth[n][j]) for n in ranks for j in range(1, ranks[n])]
    dropped = [float(worth[n][j]) for n in ranks for j in range(ranks[n], len(worth[n]))]
    assert min(kept, default=9e9) >= max(dropped, default=0)


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
def test_steps_of_ranks_spend_the_budget(step, decay):
    """Also where many components are worth the same."""
    shapes = {str(i): (96 if i % 3 else 384, 96) for i in range(24)}
    generator = torch.Generator().manual_seed(0)
    sigma = {}
    for name in shapes:
        noise = 1 if decay == 0 else 0.8 + 0.4 * torch.rand(96, generator=generator)
        sigma[name] = (torch.arange(1, 97).double() ** -decay * noise).sort(descending=True).values
    whole, least = (sum(stored(*shape, rank) for shape in shapes.values()) for rank in (96, step))
    for density in (0.1, 0.25, 0.4, 0.5, 0.7):
        ranks = allocate(sigma, shapes, density * whole, step)
        cost = sum(stored(*shape, ranks.get(name, 96)) for name, shape in shapes.items())
        assert all(rank % step == 0 for rank in ranks.values())
        assert cost <= max(density * whole, least)
        assert density * whole < least or cost >= 0.98 * density * whole


def test_global_allocation_spends_the_whole_density():
    """The uniform rule rounds down at every matrix, the global one once."""
    net = make_net()
    rule = RankRule(0.4, allocation="global")
    ranks = rule.allocate(net, lambda name: torch.linalg.svdvals(net.get_parameter(f"{name}.weight").double()))
    uniform = RankRule(0.4).allocate(make_net())
    factorize(net, ranks, None)
    other = factorize(make_net(), uniform, None)
    assert stored_density(other) <= stored_density(net) <= 0.4 and stored_density(net) > 0.38
    assert len(set(ranks.values())) > 1


def test_rank_rules() -> None:
    """Invariant 9: break-even and density <-> rank."""
    assert break_even_rank(768, 768) == 384
    assert break_even_rank(3072, 768) == pytest.approx(614.4)
    assert rank_for_density(0.5, 768, 768) == 192
    assert rank_for_density(1.0, 3072, 768) == 614
    assert rank_for_density(1e-6, 768, 768) == 1
    for rank in range(1, 300):
        assert rank_for_density(rank * (3072 + 768) / (3072 * 768), 3072, 768) == rank


def test_rank_ratio() -> None:
    """Invariant 9: 33% of 768 is 253, whatever the rounding of a float product; at least 1."""
    assert rank_for_ratio(0.33, 768, 3072) == rank_for_ratio(0.33, 3072, 768) == 253
    assert rank_for_ratio(1.0, 5, 9) == 5
    assert rank_for_ratio(0.29, 100, 100) == 29  # 0.29 * 100 = 28.999999999999996
    assert rank_for_ratio(1e-6, 768, 768) == 1
