"""One of density, rank and ratio of ranks decides; a value is given also where it is the usual one."""

from __future__ import annotations

from itertools import combinations

import pytest

from lit_compress import methods
from lit_compress.cli.options import parameters_of
from lit_compress.utils.errors import UserError

VALUES = {"density": 0.25, "rank": 30, "rank_ratio": 0.33}  # the density and the ratio that methods take by themselves
WITH_RANKS = [name for name in methods.__all__ if "rank" in parameters_of(getattr(methods, name))]


def test_methods_with_ranks_are_found():
    assert {"LPAF", "SVD", "FWSVD", "SecondOrder"} <= set(WITH_RANKS)


@pytest.mark.parametrize("name", WITH_RANKS)
def test_two_rules_are_refused_whatever_their_values(name):
    method = getattr(methods, name)
    for both in combinations([key for key in VALUES if key in parameters_of(method)], 2):
        with pytest.raises(UserError, match="only one of them can decide the ranks") as error:
            method(task="sst2", **{key: VALUES[key] for key in both})
        assert all(f"model.{key} {VALUES[key]}" in str(error.value) for key in both)


@pytest.mark.parametrize("name", WITH_RANKS)
def test_one_rule_is_taken(name):
    method = getattr(methods, name)
    for key in [key for key in VALUES if key in parameters_of(method)]:
        last = method(task="sst2", **{key: VALUES[key]}).stages()[-1]
        assert getattr(last.ranks, key) == VALUES[key]
    assert method(task="sst2").stages()[-1].ranks.density == (method.usual_density or 1.0)
