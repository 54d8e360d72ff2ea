"""Removal of inputs against least squares on the remaining columns, and greedy against loops."""

import itertools

import pytest
import torch
from moments import draw, estimated_loss, moment

from lit_compress.numerics import structures
from lit_compress.numerics.kronecker import DAMPING, change_of_bias
from lit_compress.numerics.structures import (
    RemovalPath,
    cheapest_first,
    inverse_moment,
    removal_path,
    uniform_options,
    without_inputs,
)
from lit_compress.utils.errors import UserError

GROUPS = torch.arange(12).view(4, 3)


def tokens():
    """Correlated inputs with a mean; W; G."""
    return draw(80, 12, seed=1) @ draw(12, 12, seed=2) + draw(12, seed=3), draw(5, 12, seed=4), moment(5, 5)


def least_squares(weight, inputs, kept):
    """The X without the other columns that minimises (M), by its normal equations."""
    approx = torch.zeros_like(weight)
    approx[:, kept] = torch.linalg.solve(inputs[kept][:, kept], (weight @ inputs)[:, kept].T).T
    return approx


def others(removed):
    return [i for i in range(12) if i not in removed]


@pytest.mark.parametrize("removed", [[4], [0, 1, 2], [11, 3, 7, 0, 5], list(range(11))])
def test_equals_least_squares_on_the_rest(removed):
    x, weight, _ = tokens()
    a = x.T @ x / 80
    damped = a + 1e-3 * a.diagonal().mean() * torch.eye(12)
    inverse = inverse_moment(a)
    new = without_inputs(weight, inverse, torch.tensor(removed))
    kept = others(removed)
    expected = least_squares(weight, damped, kept)
    torch.testing.assert_close(new, expected)
    assert new[:, removed].eq(0).all()
    assert inverse.data_ptr() == a.data_ptr()  # a path takes no memory of its own


def test_on_the_tokens_with_the_bias(monkeypatch):
    """Centred: no other columns and bias fit the outputs better, and their mean stays."""
    monkeypatch.setitem(DAMPING, "inputs", 0.0)
    x, weight, _ = tokens()
    m, kept = x.mean(0), others([2, 3, 9])
    c = (x - m).T @ (x - m) / 80
    new = without_inputs(weight, inverse_moment(c), torch.tensor([2, 3, 9]))
    bias = change_of_bias(weight, new, m)
    ones = torch.ones(80, 1).double()
    solution = torch.linalg.lstsq(torch.cat([x[:, kept], ones], 1), x @ weight.T).solution.T
    torch.testing.assert_close(new[:, kept], solution[:, :-1])
    torch.testing.assert_close(bias, solution[:, -1])


def greedy(weight, inputs, gradients, groups, chunk):
    """The path by solving every step anew from the start."""
    gone, left, steps, costs, before = [], list(range(len(groups))), [], [], 0.0

    def loss(removed):
        approx = least_squares(weight, inputs, others(removed))
        return estimated_loss(weight, approx, inputs, gradients)

    while left:
        alone = {i: loss(gone + groups[i].tolist()) - before for i in left}
        count = max(1, -(-chunk * len(left) // 1)) if chunk else 1
        step = sorted(left, key=alone.get)[: int(count)]
        gone = gone + groups[step].flatten().tolist()
        steps.append(step)
        costs.append(loss(gone) - before)
        before += costs[-1]
        left = [i for i in left if i not in step]
    return steps, costs


@pytest.mark.parametrize("chunk", [0.0, 0.3])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("centre", [False, True])
def test_greedy_path(chunk, size, centre):
    x, weight, g = tokens()
    a, m = x.T @ x / 80, x.mean(0)
    groups = torch.arange(12).view(-1, size)
    mean = m if centre else None
    path = removal_path(weight, a.clone(), g.clone(), groups, mean=mean, chunk=chunk)
    h = a - m[:, None] * m if centre else a
    damped = h + 1e-3 * h.diagonal().mean() * torch.eye(12)
    steps, costs = greedy(weight, damped, g + 1e-2 * g.diagonal().mean() * torch.eye(5), groups, chunk)
    assert [step.tolist() for step in path.steps] == steps
    torch.testing.assert_close(path.costs, torch.tensor(costs, dtype=torch.float64))
    assert path.sizes().tolist() == [len(step) for step in steps]
    total = (weight @ damped * ((g + 1e-2 * g.diagonal().mean() * torch.eye(5)) @ weight)).sum()
    assert float(path.costs.sum()) == pytest.approx(float(total))


def test_what_stays():
    x, weight, _ = tokens()
    a = x.T @ x / 80
    whole = removal_path(weight, a.clone(), None, GROUPS)
    path = removal_path(weight, a.clone(), None, GROUPS, keep=2)
    assert [s.tolist() for s in path.steps] == [s.tolist() for s in whole.steps[:2]]
    chunks = removal_path(weight, a.clone(), None, torch.arange(12)[:, None], keep=5, chunk=0.5)
    assert [len(s) for s in chunks.steps] == [6, 1]
    assert len(removal_path(weight, a, None, GROUPS, keep=4).costs) == 0


@pytest.mark.parametrize("saving", [0.0, 1.0, 7.0, 20.0])
def test_cheapest_first(saving):
    """With rising costs per price; against all choices."""
    costs = {"a": [1.0, 2.0, 5.0], "b": [0.5, 3.0], "c": [2.0, 8.0, 9.0, 20.0]}
    prices = {"a": [2.0, 2.0, 2.0], "b": [3.0, 3.0], "c": [4.0, 2.0, 2.0, 2.0]}
    taken = cheapest_first(*({name: torch.tensor(of[name]) for name in of} for of in (costs, prices)), saving)
    total = lambda table, choice: sum(float(sum(table[n][:k])) for n, k in choice.items())  # noqa: E731
    assert total(prices, taken) >= saving
    for choice in itertools.product(*(range(len(costs[n]) + 1) for n in costs)):
        other = dict(zip(costs, choice, strict=True))
        if total(prices, other) >= total(prices, taken):
            assert total(costs, other) >= total(costs, taken) - 1e-9


def test_errors(monkeypatch):
    x, weight, _ = tokens()
    monkeypatch.setitem(DAMPING, "inputs", 0.0)
    with pytest.raises(UserError, match="budget: 9 cannot be saved; the largest saving is 5"):
        cheapest_first({"a": torch.ones(1)}, {"a": torch.tensor([5.0])}, 9)
    with pytest.raises(UserError, match=r"key: .* singular with damping 0"):
        inverse_moment(torch.ones(3, 3), "key")
    with pytest.raises(UserError, match="key: all its gradients are zero"):
        removal_path(weight, x.T @ x, torch.zeros(5, 5), GROUPS, name="key")


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_joined_along_the_lower_hull(seed):
    """Against all chords: no point of the path lies below the hull, corners are points, slopes rise."""
    generator = torch.Generator().manual_seed(seed)
    costs, prices = torch.rand(2, 9, generator=generator, dtype=torch.float64)
    prices = prices.clamp_min(0.1)
    x, y = (torch.cat([torch.zeros(1), v.cumsum(0)]) for v in (prices, costs))
    corners = sorted({cheapest_first({"a": costs}, {"a": prices}, float(saving))["a"] for saving in x - 1e-9})
    slopes = y[corners].diff() / x[corners].diff()
    assert corners[0] == 0 and corners[-1] == 9 and (slopes.diff() > 0).all()
    for k in range(10):
        inside = max(i for i, c in enumerate(corners) if x[c] <= x[k])
        at = y[corners[inside]] + (slopes[inside] * (x[k] - x[corners[inside]]) if inside < len(slopes) else 0)
        assert y[k] >= at - 1e-9


def test_a_multiple_is_left_after_every_step():
    x, weight, _ = tokens()
    path = removal_path(weight, x.T @ x / 80, None, torch.arange(12)[:, None], chunk=0.1, multiple=5)
    assert (12 - path.sizes().cumsum(0)).tolist() == [10, 5, 0]


def test_rows_and_columns_move_to_the_beginning_of_the_memory(monkeypatch):
    monkeypatch.setattr(structures, "_ROWS", 3)
    for rows, columns in (([0, 1, 4, 5, 8, 9, 10], [1, 2, 9]), (list(range(11)), [0]), ([10], list(range(12)))):
        matrix = draw(11, 12)
        expected = matrix[rows][:, columns]
        found = structures._compacted(matrix, torch.tensor(rows, dtype=torch.int64), torch.tensor(columns))
        assert torch.equal(found, expected) and found.data_ptr() == matrix.data_ptr() and found.is_contiguous()


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
    assert path.loss(torch.arange(6)).tolist() == [0.0, 1.0, 2.0, 5.0, 9.0, 13.0]
    assert [path.first(count).tolist() for count in (0, 1, 3)] == [[], [4], [0, 1, 4]]
