"""StackedLowRankLinear: the outputs of separate factors, one right factor, one product for all layers of a stack."""

import copy
import pickle

import pytest
import torch
from moments import decompose
from tiny import make_batch, make_net
from torch import nn

from lit_compress.layers import Int8Embedding, LowRankLinear, LowRankRowsLinear, StackedLowRankLinear
from lit_compress.models import storage, surgery
from lit_compress.models.accounting import count_params, dense_site_params, flops, stored_density
from lit_compress.models.sites import find_sites
from lit_compress.stages.rank_rule import RankRule

FAMILIES = ["bert", "albert", "deberta-v2", "modernbert", "bart", "t5", "llama"]


class Three(nn.Module):
    """Three Linears of 6 inputs, as query, key and value are called."""

    def __init__(self, biases=(True, True, True)):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, out, bias) for out, bias in zip((5, 4, 3), biases, strict=True))

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x), self.c(x)], -1)


def stacked(rank=2, **settings):
    torch.manual_seed(0)
    net = Three(**settings).double()
    left, right = decompose(surgery.stacked_weight(net, ("a", "b", "c")), rank)
    plain = [layer.bias for layer in (net.a, net.b, net.c)]
    surgery.factorize(net, {"a": rank}, lambda *_: (left, right), stacks={"a": ("a", "b", "c")})
    biases = [torch.zeros(out) if bias is None else bias for bias, out in zip(plain, (5, 4, 3), strict=True)]
    return net, left, right, torch.cat(biases)


@pytest.fixture
def products(monkeypatch):
    """The shapes of the weights of all products."""
    seen, linear = [], nn.functional.linear

    def counted(x, weight, bias=None):
        seen.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    return seen


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (0, 6)])
@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True), (False, False, False)])
def test_equals_separate_factors(shape, biases):
    net, left, right, bias = stacked(biases=biases)
    x = torch.randn(shape, dtype=torch.float64)
    expected = torch.zeros(*shape[:-1], 12, dtype=torch.float64)
    for o in range(12):
        expected[..., o] = sum(left[o, r] * right[r, i] * x[..., i] for r in range(2) for i in range(6)) + bias[o]
    assert torch.allclose(net(x), expected)


def test_parameters_are_those_of_one_right_factor():
    net, *_ = stacked(rank=2)
    assert sum(p.numel() for p in net.parameters()) == 2 * (5 + 4 + 3 + 6) + 12
    assert [name for name in net.state_dict() if name.endswith("right")] == ["a.right"]
    assert net.c.factors()[1] is net.a.right


def test_the_narrow_product_is_made_once_per_input(products):
    net, *_ = stacked()
    x, other = torch.randn(3, 6).double(), torch.randn(3, 6).double()
    net(x), net(other)
    assert products.count((2, 6)) == 2 and len(products) == 8
    assert net.a._last == ()  # nothing is kept, so no graph lives longer than its forward


@pytest.mark.parametrize("change", ["input in place", "other input", "weight in place", "grad mode"])
def test_a_kept_product_is_used_for_the_same_values_only(change, products):
    net, left, _, bias = stacked()
    x = torch.randn(3, 6).double()
    with torch.no_grad():
        net.a(x)
    with torch.set_grad_enabled(change == "grad mode"):
        if change == "input in place":
            x += 1
        elif change == "other input":
            x = x.clone()
        elif change == "weight in place":
            net.a.right.mul_(2)
        y = net.b(x)
    assert products.count((2, 6)) == 2
    assert torch.allclose(y, x @ net.a.right.T @ left[5:9].T + bias[5:9])
    assert y.requires_grad == (change == "grad mode")


def test_gradients_are_those_of_separate_factors():
    net, left, right, bias = stacked()
    x = torch.randn(4, 6).double()
    shared = right.clone().requires_grad_()
    (x @ shared.T @ left.T + bias).square().sum().backward()
    net(x).square().sum().backward()
    assert torch.allclose(net.a.right.grad, shared.grad)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_have_their_own_factor(how):
    net, *_ = stacked()
    x = torch.randn(3, 6).double()
    net.a(x)  # its product is kept, and has a graph
    again = how(net)
    assert torch.equal(again(x), net(x))
    again.a.right.data.zero_()
    assert again.b._holder[0] is again.a and not torch.equal(again(x), net(x))


def test_inference_mode():
    net, *_ = stacked()
    x = torch.randn(3, 6).double()
    with torch.inference_mode():
        inside = net(x.clone())
    assert torch.equal(inside, net(x))


def test_a_compiler_sees_plain_products():
    net, *_ = stacked()
    x = torch.randn(3, 6).double()
    program = torch.export.export(net, (x,)).module()
    assert torch.allclose(program(x + 1), net(x + 1))


def inputs():
    return {k: v for k, v in make_batch().items() if k in ("input_ids", "attention_mask")}


def compress(net, density=0.5):
    rule = RankRule(density, stacked=True)
    return surgery.factorize(
        net, rule.allocate(net), lambda _, w, r: decompose(w, r), stacks=rule.stacks(net)
    ).eval()  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_is_counted_once_and_reloaded(family, tmp_path):
    net, counted = compress(make_net(family)), 0
    for site in find_sites(net):
        layer = net.get_submodule(site.name)
        if isinstance(layer, nn.Linear):
            counted += layer.weight.numel()
        else:
            counted += layer.rank * (layer.out_features + (0 if getattr(layer, "first", "") else layer.in_features))
    assert count_params(net).sites == counted
    assert stored_density(net) == counted / dense_site_params(net) <= 0.5
    storage.save_net(net, tmp_path)
    again = storage.load_net(tmp_path)
    assert surgery.describe(again) == surgery.describe(net) != {}
    assert torch.equal(again(**inputs()).logits, net(**inputs()).logits)


def test_flops_fall_with_the_parameters():
    """Per token: 2 FLOPs for every stored weight, as the narrow product of a stack is made once."""
    dense, net = make_net(), compress(make_net(), 0.5)
    saved = dense_site_params(net) - count_params(net).sites
    assert flops(dense, 16) - flops(net, 16) == 2 * 16 * saved


def test_sizes_are_printed():
    assert repr(StackedLowRankLinear(8, 6, 2)) == "StackedLowRankLinear(8, 6, rank=2)"
    assert repr(LowRankLinear(8, 6, 2)) == "LowRankLinear(8, 6, rank=2)"
    assert repr(LowRankRowsLinear(8, 6, 2, 3)) == "LowRankRowsLinear(8, 6, rank=2, rows=3)"
    assert repr(Int8Embedding(9, 4)) == "Int8Embedding(9, 4)"
