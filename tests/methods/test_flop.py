"""FLOP: the gated factors, the expected size, the ranks that fit the budget, a short run, what is refused."""

import pytest
import torch
from helpers import begun
from moments import decompose
from tiny import make_net
from torch import nn

from lit_compress.export.fuse import fuse
from lit_compress.layers import LowRankLinear
from lit_compress.layers.training.gated import GatedRankLinear
from lit_compress.methods import FLOP
from lit_compress.methods.flop import FLOPPruning, RankPruning, gated_size, grouped
from lit_compress.models.accounting import density, stored_density
from lit_compress.models.sites import find_sites, site_shapes
from lit_compress.numerics.hard_concrete import probability
from lit_compress.utils.errors import UserError


def flop(density=0.4, **settings):
    given = {"epochs": 2, "learning_rate": 1e-3, "target_warmup": 0.4, "init": "finetuned"} | settings
    return FLOP(backbone="unused", density=density, prune=FLOPPruning(**given))


def test_the_layer_is_the_sum_over_ranks():
    """y = sum_k z_k p_k (q_k x) + b; fused it is the same: open ranks only, or the matrix."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 5).double()
    layer = GatedRankLinear.from_factors(linear, *decompose(linear.weight.detach(), 5, side="balanced"))
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.allclose(layer(x), linear(x))
    for z, kind in (([0.9, 0, 0.5, 0, 0], LowRankLinear), ([1, 0.9, 0, 0.5, 0.1], nn.Linear)):
        layer.z = torch.tensor(z, dtype=torch.float64)
        expected = linear.bias.repeat(3, 1).detach()
        for row in range(3):
            for k in range(5):
                expected[row] += z[k] * layer.left[:, k].detach() * (layer.right[k] @ x[row]).detach()
        assert torch.allclose(layer(x), expected) and torch.allclose(layer.fuse()(x), expected)
        assert type(layer.fuse()) is kind
    layer.z = torch.tensor([0.0, 1, 0, 1, 0]).double()
    assert layer.fuse().rank == 2


def test_the_expected_size_is_the_double_sum():
    """s = sum over matrices of (out + in) sum_k P(z_k > 0), over the weights of the matrices; full ranks may differ."""
    net = make_net("llama", "wikitext2")
    shapes = site_shapes(net)
    assert set(grouped(shapes)) == {"ranks_32", "ranks_16"}  # keys and values have fewer heads
    whole = sum(out * inner for out, inner in shapes.values())
    size = gated_size(shapes, whole)
    log_alphas = {name: torch.randn(shape) for name, shape in size.shapes.items()}
    expected = 0.0
    for gate, names in grouped(shapes).items():
        for group, name in enumerate(names):
            for k in range(min(shapes[name])):
                expected += sum(shapes[name]) * float(probability(log_alphas[gate][group, k]))
    assert float(size.density(log_alphas)) == pytest.approx(expected / whole, rel=1e-5)


@pytest.mark.parametrize(("target", "round_to"), [(0.3, None), (0.85, None), (0.5, 4)])
def test_ranks_fill_the_budget_where_some_matrices_stay_whole(target, round_to, dense):
    """With gates that differ by matrix: never above the budget, and below by less than a rank of every matrix."""
    method = FLOP(backbone="unused", density=target, round_to=round_to, prune=FLOPPruning(init="finetuned"))
    torch.manual_seed(0)
    stage = begun(method, dense, 10).stage
    with torch.no_grad():
        for gate in stage.gates.values():
            gate.log_alpha.copy_(torch.randn_like(gate.log_alpha) + torch.linspace(-3, 3, len(gate.log_alpha))[:, None])
    stage.deterministic(method.net, 10)
    small = fuse(method.net)
    layers = [small.get_submodule(site.name) for site in find_sites(small)]
    whole = [layer for layer in layers if isinstance(layer, nn.Linear)]
    ranks = [layer.rank for layer in layers if isinstance(layer, LowRankLinear)]
    below = 0.01 if round_to is None else 0.04
    assert target - below < stored_density(small) == density(small) <= target
    assert (target < 0.5) or whole
    assert all(rank >= 1 and (round_to is None or rank < 4 or rank % 4 == 0) for rank in ranks)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"density": 0.01},
            r"model\.density: 0\.01 is less than one rank of every matrix; nearest",
        ),
        ({"log_alpha": 20}, r"prune\.log_alpha: 20 is not in \[-12, 12\]; usual: 2\.5"),
    ],
)
def test_refusals(settings, error):
    with pytest.raises(UserError, match=error):
        method = flop(**settings)
        method.stages()[-1].check(make_net())
    assert isinstance(flop().stages()[-1], RankPruning) and FLOP().stages()[-1].from_backbone
