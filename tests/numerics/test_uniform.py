"""The numbers that all layers keep alike: against every combination; the loss between the steps of a path."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_compress.numerics.structures import RemovalPath
from lit_compress.numerics.uniform import first_removed, loss_of_removal, uniform_options


@pytest.mark.parametrize("sizes", [(40,), (7, 50), (5, 3, 30)])
def test_the_cheapest_combination_that_saves_enough(sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    losses = [torch.rand(size, generator=generator, dtype=torch.float64) for size in sizes]
    savings = [torch.rand(size, generator=generator, dtype=torch.float64) * 10 for size in sizes]
    every = list(itertools.product(*map(range, sizes)))

    def total(of, options):
        return sum(float(values[i]) for values, i in zip(of, options, strict=True))

    for share in (0.0, 0.3, 0.8, 1.0):
        saving = share * sum(float(values.max()) for values in savings)
        found = uniform_options(losses, savings, saving)
        best = min(total(losses, options) for options in every if total(savings, options) >= saving - 1e-8)
        assert total(savings, found) >= saving - 1e-8 and total(losses, found) == pytest.approx(best)
    assert uniform_options(losses, savings, saving + 1e-3) is None


def test_a_path_is_cut_inside_its_steps():
    path = RemovalPath((torch.tensor([4, 1]), torch.tensor([0]), torch.tensor([2, 3])), torch.tensor([2.0, 3.0, 8.0]))
    assert loss_of_removal(path, torch.arange(6)).tolist() == [0.0, 1.0, 2.0, 5.0, 9.0, 13.0]
    assert [first_removed(path, count).tolist() for count in (0, 1, 3)] == [[], [4], [0, 1, 4]]
