"""One of density, rank and ratio of ranks decides; a value is given also where it is the usual one."""

from __future__ import annotations

import copy
from inspect import signature
from itertools import combinations

import pytest
import torch
from tiny import make_net

from lit_compress import methods
from lit_compress.models.accounting import stored_density
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize, without_values
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError

VALUES = {"density": 0.25, "rank": 30, "rank_ratio": 0.33}  # the density and the ratio that methods take by themselves
WITH_RANKS = [name for name in methods.__all__ if "rank" in signature(getattr(methods, name)).parameters]


def test_methods_with_ranks_are_found():
    assert {"LPAF", "SVD", "FWSVD", "SecondOrder"} <= set(WITH_RANKS)


@pytest.mark.parametrize("name", WITH_RANKS)
def test_two_rules_are_refused_whatever_their_values(name):
    method = getattr(methods, name)
    for both in combinations([key for key in VALUES if key in signature(method).parameters], 2):
        with pytest.raises(UserError, match="only one of them can decide the size") as error:
            method(task="sst2", **{key: VALUES[key] for key in both})
        assert all(f"model.{key} {VALUES[key]}" in str(error.value) for key in both)


@pytest.mark.parametrize("name", WITH_RANKS)
def test_one_rule_is_taken(name):
    method = getattr(methods, name)
    for key in [key for key in VALUES if key in signature(method).parameters]:
        assert getattr(method(task="sst2", **{key: VALUES[key]}).rule, key) == VALUES[key]
    assert method(task="sst2").rule.density == (method.usual_density or 1.0)


@pytest.mark.parametrize("allocation", ["uniform", "global"])
@pytest.mark.parametrize("stacked", [False, True])
def test_ranks_in_multiples_within_the_density(allocation, stacked):
    """No other choice of multiples could take one step more; a rank that is too small for a step stays."""
    net = make_net("bert", hidden_size=64, intermediate_size=128)
    places = {site.name: i for i, site in enumerate(find_sites(net))}

    def sigma(name):  # no two components are worth the same
        return torch.linspace(2 + 0.01 * places[name], 1, 64, dtype=torch.float64)

    rule = RankRule(0.5, allocation=allocation, stacked=stacked, round_to=4)
    ranks = rule.allocate(net, sigma)
    assert ranks and not any(rank % 4 for rank in ranks.values())
    small = copy.deepcopy(net)
    factorize(small, ranks, None, stacks=rule.stacks(small))
    whole = sum(net.get_submodule(site.name).weight.numel() for site in find_sites(net))
    assert 0.5 - 4 * 256 / whole < stored_density(small) <= 0.5
    assert RankRule(rank=3, round_to=4).allocate(net) == RankRule(rank=3).allocate(net)
    assert set(RankRule(rank=11, round_to=4).allocate(net).values()) == {8}
    with pytest.raises(UserError, match=r"model\.round_to: 0 .* 1"):
        RankRule(0.5, round_to=0)


@pytest.mark.parametrize(("step", "grown", "count"), [(2, 10, 6), (8, 16, 1)])
def test_the_rest_of_the_density_is_spent_on_the_first_matrices(step, grown, count):
    """Ranks of 8 and 10 are rounded down; the first matrices that can take a step of the rest get it."""
    ranks = [*RankRule(0.5, round_to=step).allocate(make_net()).values()]
    assert ranks.count(grown) == count and set(ranks) == {8, grown}


@pytest.mark.parametrize("name", ["SVD", "FWSVD", "LPAF", "FLOP", "LoSparse", "LowRankI", "LowRankII", "SecondOrder"])
def test_a_density_below_one_rank_of_every_matrix_is_refused(name):
    """Some kept one rank of each, 0.0547 of a tiny BERT, without a word."""
    net = without_values(make_net)
    [last] = getattr(methods, name)(task="sst2", density=0.04).own_stages()[-1:]
    with pytest.raises(UserError, match=r"model.density: 0.04 is less than one rank of every matrix; nearest valid va"):
        last.check(net)
        last.outline(net)


def test_a_whole_ratio_keeps_all():
    assert RankRule(rank_ratio=1.0).keeps_all and not RankRule(rank_ratio=0.5).keeps_all
