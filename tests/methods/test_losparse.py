"""LoSparse inside a real fit: decomposition, score, rows, budget; its two low-rank variants."""

import pytest
import torch
from helpers import begun
from helpers import evaluated as logits
from tiny import make_net

from lit_compress.export.fuse import fuse
from lit_compress.layers import LowRankLinear, LowRankSparseLinear
from lit_compress.methods import ITP, LoSparse, LowRankI, LowRankII
from lit_compress.methods.losparse import LowRankPlusSparse
from lit_compress.models import accounting as budget
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import factorize
from lit_compress.stages.rows import RowPruning, RowSparsePruning
from lit_compress.utils.errors import UserError

FAST = {"epochs": 2, "learning_rate": 1e-3, "low_rank": 0.1, "interval": 3}


def losparse(density=0.4, backbone="unused", **settings):
    return LoSparse(backbone=backbone, density=density, prune=LowRankPlusSparse(**FAST | settings))


def layers(net):
    return [net.get_submodule(site.name) for site in find_sites(net)]


@pytest.mark.parametrize(("share", "real"), [(0.01, 0.0111), (0.02, 0.0210), (0.03, 0.0310), (0.05, 0.0510)])
def test_share_of_the_factors_of_bert_base(bert_base, share, real):
    """Rounding up costs this much, which is taken from the rows."""
    found = RowSparsePruning(RowPruning(), 0.2, share).budget_of(bert_base)
    assert found.factors / 84_934_656 == pytest.approx(real, abs=1e-4)
    assert found.final * 84_934_656 + found.factors == pytest.approx(round(0.2 * 84_934_656))


def test_published_schedule():
    """Spec table for MNLI: T=12272, t_i=675, t_f=3375, p_T=.15, and the printed formula is another one."""
    stage = RowSparsePruning(RowPruning(start=675, end=3375), 0.2, 0.05)
    stage.set_total_steps(12272)
    for step, p in ((674, 1), (675, 1), (2000, 0.652), (4050, 0.324), (5000, 0.241), (8896, 0.15), (8897, 0.15)):
        assert stage.target(step, stage.budget.final) == pytest.approx(p, abs=6e-4)
    printed = 0.15 + 0.85 * (1 - (676 - 675 - 3375) / (12272 - 675 - 3375)) ** 3
    assert printed > 1 >= stage.target(676, stage.budget.final)
    assert not stage.at_budget(8896) and stage.at_budget(8897)


def test_itp_prunes_the_weight_itself(dense):
    method = begun(ITP(backbone="unused", density=0.3), dense)
    assert torch.equal(logits(method.net), logits(load_net(dense)))
    for layer, linear in zip(layers(method.net), layers(load_net(dense)), strict=True):
        assert layer.rank == 0 and layer.left is None and torch.equal(layer.sparse, linear.weight)
    assert method.stage.budget.final == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scores_equal_a_hand_made_average(fit, dense, accumulate):
    """Eqs. 2-4 per entry: one term per optimizer step, of whole gradients before they are clipped, windows of 3."""
    method, terms = losparse(density=0.999, start=0.8, end=0.05, beta=0.7), []
    after_step = RowSparsePruning.after_step

    def note(stage):
        terms.append([(w * grad).abs().detach() for w, grad in zip(stage._weights, grads, strict=True)])

    def before(net):
        grads[:] = [weight.grad.clone() for weight in stage._weights]

    grads, stage = [], method.stages()[-1]
    method.stages = lambda: [stage]
    stage.before_step = before
    stage.after_step = lambda net, n: (note(stage), after_step(stage, net, n))
    fit(method, "prune", dense, accumulate=accumulate, max_epochs=1, gradient_clip_val=1e-3)
    assert len(terms) == -(-13 // accumulate)
    expected = [torch.zeros_like(term) for term in terms[0]]
    for step in range(0, len(terms), 3):
        for i, entry in enumerate(expected):
            window = torch.stack([terms[s][i] for s in range(step - 3, step)]).mean(0) if step else 0 * entry
            expected[i] = 0.7 * entry + 0.3 * window
    assert all(torch.allclose(s, e.mean(1), rtol=1e-4) for s, e in zip(stage.scores, expected, strict=True))


def test_rows_are_exactly_zero_at_the_end(fit, dense):
    """Invariants 6 and 7: the budget to one row after every step of the last phase, only rows of S are touched."""
    seen = []

    def look(trainer, method):
        stage, step = method.stage, trainer.global_step
        kept = sum(int(w.ne(0).any(1).sum()) * w.shape[1] for w in stage._weights)
        seen.append(kept)
        if stage.at_budget(step):
            most = round(stage.budget.final * stage.budget.total)
            assert most - 64 < kept <= most
            status = stage.status(method.net, step)
            assert status["target"] == pytest.approx(0.4, abs=1e-4)
            assert status["density"] == pytest.approx(budget.density(method.net), abs=1e-9)

    method = fit(losparse(), "prune", dense, look)
    assert seen[0] == method.stage.budget.total and len(seen) == 26
    assert method.stage.at_budget(19) and not method.stage.at_budget(17)
    for layer in layers(method.net):
        assert layer.left.all() and layer.right.all() and layer.bias.any()
    assert 0.39 < budget.density(method.net) <= 0.4


def test_rows_between_prunings_take_part_again(fit, dense):
    """Middle phase: pruned once a window; the steps between leave no mask behind."""
    zeros = []

    def look(trainer, method):
        zeros.append(sum(int((~w.ne(0).any(1)).sum()) for w in method.stage._weights))

    method = fit(losparse(start=3, end=8, density=0.3), "prune", dense, look)
    arrived = 26 - method.stage._end
    for step, count in enumerate(zeros, start=1):
        pruned = step > 3 and ((step - 1) % 3 == 0 or step >= arrived)
        assert (count > 0) == pruned, step


@pytest.mark.parametrize("density", [0.05, 0.1, 0.3, 0.97])
def test_any_density(dense, density):
    """Also smaller than the low-rank share, where the ranks shrink and no row stays."""
    method = begun(losparse(density), dense)
    stage = method.stage
    assert 0 <= stage.budget.final < density and (stage.budget.final == 0) == (density <= 0.1)
    if density > 0.05:  # 32 x 32: one rank is 6 %
        assert stage.budget.factors + stage.budget.final * stage.budget.total <= density * stage.budget.total + 0.5
    for weight in stage._weights:
        weight.grad = torch.rand_like(weight)
    stage.after_step(method.net, 1)
    stage.after_step(method.net, 100)
    assert budget.density(fuse(method.net)) <= max(density, 0.0625)


def test_bfloat16_weights_have_float32_scores():
    stage = RowSparsePruning(RowPruning(), 0.5)
    net = make_net().bfloat16()
    stage.budget = stage.budget_of(net)
    stage.attach(factorize(net, dict.fromkeys(stage.budget.ranks, 0), None, LowRankSparseLinear))
    assert {state.dtype for state in stage.scores + stage.windows} == {torch.float32}


def test_low_rank_one_and_two_end_with_the_same_shapes(fit, dense):
    """Section 4.4: factors only, from the same decomposition."""
    first = begun(LowRankI(backbone="unused", density=0.4), dense).net
    second = LowRankII(backbone="unused", density=0.4, prune=RowPruning(epochs=2, learning_rate=1e-3, interval=3))
    start = begun(LowRankII(backbone="unused", density=0.4), dense).net
    for one, two in zip(layers(first), layers(start), strict=True):
        assert torch.allclose(one.left @ one.right, two.left @ two.right, atol=1e-6)
        assert torch.allclose(one.left.T @ one.left, one.right @ one.right.T, atol=1e-6)
    assert torch.allclose(logits(start), logits(load_net(dense)), atol=1e-5)
    assert not torch.allclose(logits(first), logits(start), atol=1e-5)
    fused = fuse(fit(second, "prune", dense).net)
    assert all(type(m) is LowRankLinear for m in layers(fused))
    assert [m.rank for m in layers(fused)] == [m.rank for m in layers(first)]
    assert budget.count_params(fused).sites == budget.count_params(first).sites <= 0.4 * budget.dense_site_params(first)


@pytest.mark.parametrize(("density", "share"), [(0.2, 0.05), (0.1, 0.05), (0.05, 0.025), (0.02, 0.01)])
def test_the_usual_share_of_the_factors_leaves_rows(density, share):
    """Factors alone learn much less: with 0.05 of 0.05 there was no row."""
    stage = LoSparse(task="sst2", backbone="b", teacher="t", density=density).stages()[-1]
    assert stage.low_rank == pytest.approx(share)
    given = LowRankPlusSparse(low_rank=0.05)
    stage = LoSparse(task="sst2", backbone="b", teacher="t", density=density, prune=given).stages()[-1]
    assert stage.low_rank == min(0.05, density)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low_rank": 0.0}, "prune.low_rank: 0.0 is not in .* nearest valid 0.01"),
        ({"low_rank": 1.5}, "nearest valid 1.0"),
        ({"start": -0.1}, "prune.start: -0.1 is neither .* nearest valid 0"),
        ({"end": 2.5}, "prune.end: 2.5 is neither .* nearest valid 2"),
        ({"start": 0.6, "end": 0.4}, "0.6 \\+ 0.4 leave no step"),
        ({"interval": 0}, "prune.interval: 0 is below 1"),
        ({"beta": 1.0}, "prune.beta: 1.0 is not in .* nearest valid 0.99"),
        ({"epochs": 0}, "epochs: 0 is below 1"),
    ],
)
def test_bad_settings_are_one_line(settings, words):
    with pytest.raises(UserError, match=words):
        LowRankPlusSparse(**settings)
