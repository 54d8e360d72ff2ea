"""Heads and neurons that became constants: cut away, the function stays."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tiny import ALL, DECODERS, make_batch, make_net
from torch import nn

from lit_compress.export.fuse import compact
from lit_compress.layers import LowRankRowsLinear, LowRankSparseLinear, SizedLinear
from lit_compress.models import accounting as budget
from lit_compress.models.architectures import ARCHITECTURES
from lit_compress.models.constant_units import remove_constant_units
from lit_compress.models.cut import cut_closed
from lit_compress.models.record import FEED_FORWARD
from lit_compress.models.sites import cuttable, find_sites, sublayers
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, factorize


def sites(net, layer, cross=False, stack=None):
    """The modules of a block by role: of the last stack, with its attention over itself or over the encoder."""
    stack = stack or find_sites(net)[-1].stack
    own = [s for s in find_sites(net) if (s.layer, s.stack) == (layer, stack)]
    return {s.role: net.get_submodule(s.name) for s in own if s.cross == cross or s.role in FEED_FORWARD}


def rows_net(family="bert", **settings):
    """A net of rank-0 layers, all its values at random, of 2 layers, 4 heads of 8, 64 neurons."""
    net = make_net(family, dropout=0.0, **settings).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            nn.init.normal_(p, 1.0 if "norm" in name.lower() else 0.0, 0.3)
    return factorize(net, {s.name: 0 for s in find_sites(net)}, None, LowRankSparseLinear)


def zero(linear, *rows):
    with torch.no_grad():
        for part in rows:
            linear.sparse[part] = 0


def logits(net):
    batch = make_batch()
    with torch.no_grad():
        return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def pruned(family="bert", cross=False, **settings):
    net = rows_net(family, **settings)
    first = sites(net, 0, cross)
    if "gate_up" in first:
        zero(first["gate_up"], slice(10, 30), slice(64 + 10, 64 + 30))
    else:
        zero(first["up"], slice(10, 30))
    if "v" not in first:
        zero(first.get("qkv", first["o"]), slice(64, 72), slice(88, 96), slice(73, 74), slice(4, 12))
        return net
    zero(first["v"], slice(0, 8), slice(24, 32), 9)  # two whole heads, and one row of a living one
    zero(first["q"], slice(4, 12))
    if "gate" in first:
        zero(first["gate"], slice(10, 30))
    zero(first["down"], slice(0, 20))
    zero(first["o"], 3)
    return net


HEADS = [family for family, record in ARCHITECTURES.items() if record.cuts_heads]
# every query has a key and a value of its own, in Linears of their own
MULTI_HEAD = sorted({*HEADS} - {*DECODERS, "modernbert"} | {"opt"})


@pytest.mark.parametrize(
    ("family", "cross"),
    [*((family, False) for family in (*MULTI_HEAD, "deberta-v2-own-positions")), ("bart", True)],
)
def test_cut_net_is_the_zeroed_one(family, cross, tmp_path):
    """ITP's invariant: folded equals zeroed; the sizes are those that are left; it survives being saved."""
    name, settings = ALL[family]
    net = pruned(name, cross, **settings)
    fused = compact(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-5)
    first = sites(fused, 0, cross)
    assert [(first[r].in_features, first[r].out_features) for r in ("q", "k", "v", "o", "up", "down")] == [
        (32, 16), (32, 16), (32, 16), (16, 32), (32, 44), (44, 32),
    ]  # fmt: skip
    assert isinstance(first["k"], SizedLinear) and isinstance(first["up"], SizedLinear)
    assert (first["v"].rows, first["q"].rows, first["o"].rows, first["down"].rows) == (15, 12, 31, 12)
    assert all(type(m) is nn.Linear for m in sites(fused, 1).values())
    save_net(fused, tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(fused) and torch.equal(logits(again), logits(fused))
    assert torch.equal(logits(compact(again)), logits(again))


@pytest.mark.parametrize(("family", "width"), [("llama", 8), ("qwen3", 16), ("gemma2", 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_queries_go_with_their_key(family, width, bias):
    """4 heads of queries, 2 of keys and values; a neuron needs a constant of 0, or both factors constant.

    Qwen3's norms of queries and keys are the same for every head, and its networks have no biases.
    """
    net = rows_net(family, attention_bias=bias, **({"mlp_bias": bias} if family == "llama" else {}))
    first = sites(net, 0)
    zero(first["v"], slice(width, 2 * width))
    zero(first["gate"], slice(0, 10))
    zero(first["up"], slice(6, 20))
    fused = compact(net)
    torch.testing.assert_close(logits(fused), logits(net), atol=1e-5, rtol=1e-5)
    first, kept = sites(fused, 0), 60 if bias and family == "llama" else 44
    assert [(first[r].in_features, first[r].out_features) for r in ("q", "k", "v", "o", "gate", "up", "down")] == [
        (32, 2 * width), (32, width), (32, width), (2 * width, 32), (32, kept), (32, kept), (kept, 32),
    ]  # fmt: skip
    assert (first["o"].bias is not None) == bias and (first["down"].bias is not None) == (kept == 60)


def test_matrices_of_every_head_lose_the_same_rows(tmp_path):
    """GPT-NeoX: 24 rows for the q, k and v of head 0, then those of head 1."""
    net = rows_net("gpt_neox")
    first = sites(net, 0)
    zero(first["qkv_by_head"], slice(24 + 16, 48), slice(48 + 16, 72), slice(0, 8), slice(72 + 8, 72 + 16))
    zero(first["up"], slice(0, 20))
    fused = compact(net)
    torch.testing.assert_close(logits(fused), logits(net), atol=1e-5, rtol=1e-5)
    first = sites(fused, 0)
    assert [(first[r].in_features, first[r].out_features) for r in ("qkv_by_head", "o", "up", "down")] == [
        (32, 3 * 16), (16, 32), (32, 44), (44, 32),
    ]  # fmt: skip
    assert first["qkv_by_head"].rows == 3 * 16 - 8 - 8
    assert describe(load_saved(fused)) == describe(fused)


@pytest.mark.parametrize("bias", [False, True])
def test_matrices_in_one_linear_lose_the_same_rows(bias, tmp_path):
    """ModernBERT: q, k, v under each other, gate and up; a head goes from all three, a neuron from both."""
    net = rows_net("modernbert", attention_bias=bias, mlp_bias=bias)
    first = sites(net, 0)
    zero(first["qkv"], slice(0, 8), slice(64 + 8, 64 + 24), slice(32 + 24, 32 + 32))  # values of the heads 1 and 2
    zero(first["gate_up"], slice(0, 10), slice(64 + 6, 64 + 20))
    fused = compact(net)
    torch.testing.assert_close(logits(fused), logits(net), atol=1e-5, rtol=1e-5)
    first, kept = sites(fused, 0), 60 if bias else 44
    assert [(first[r].in_features, first[r].out_features) for r in ("qkv", "o", "gate_up", "down")] == [
        (32, 3 * 16), (16, 32), (32, 2 * kept), (kept, 32),
    ]  # fmt: skip
    assert first["qkv"].rows == 3 * 16 - 8 - 8 and (first["o"].bias is not None) == bias
    save_net(fused, tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(fused) and torch.equal(logits(again), logits(fused))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("albert", {}), *(("t5", {"feed_forward_proj": f}) for f in ("gated-silu", "gated-sigmoid"))],
)
def test_gated_neurons_go_with_what_they_gave(family, settings):
    """ALBERT's heads are a number in code, and stay."""
    net = pruned(family, **settings)
    fused = compact(net)
    torch.testing.assert_close(logits(fused), logits(net), atol=1e-4, rtol=1e-4)
    first = sites(fused, 0)
    assert first["v"].out_features == (32 if family == "albert" else 16)
    assert (first["v"].rows, first["up"].out_features) == (15, 44)
    assert describe(load_saved(fused)) == describe(fused)


def load_saved(net):
    with TemporaryDirectory() as folder:
        save_net(net, Path(folder))
        return load_net(Path(folder))


@pytest.mark.parametrize("family", HEADS)
def test_everything_dead(family):
    """All heads of a layer, all neurons of another: one head stays, without a weight."""
    net = rows_net(family)
    roles = sites(net, 0).keys()
    fused_roles, up = [role for role in roles if "qkv" in role], "gate_up" if "gate_up" in roles else "up"
    v, attention = (*fused_roles, (*fused_roles, "o")) if fused_roles else ("v", "qkvo")
    zero(sites(net, 0)[v], slice(64 if v == "qkv" else 0, None))
    zero(sites(net, 1)[up], slice(None))
    fused = compact(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-5)
    first, second, width = sites(fused, 0), sites(fused, 1), sites(net, 0)["o"].in_features // 4
    assert all(isinstance(first[r], LowRankRowsLinear) and first[r].rows == 0 for r in attention)
    if fused_roles:
        assert first[v].out_features == 3 * first["o"].in_features == 3 * width
    else:
        assert first["v"].out_features == width and first["o"].in_features == first["q"].out_features
    assert (second[up].out_features, second["down"].in_features) == (0, 0)
    assert sum(p.numel() for r in attention for p in budget.weights(first[r])) == 0


def test_nothing_to_cut():
    """Dense nets, nets with a low-rank part, and zeros that are not of whole heads stay as they are."""
    net = make_net()
    with torch.no_grad():
        sites(net, 0)["up"].weight[:5] = 0
    assert describe(compact(net)) == {}
    net = rows_net()
    zero(sites(net, 0)["v"], slice(0, 7))
    zero(sites(net, 0)["q"], slice(None))
    before = describe(net)
    remove_constant_units(net)
    assert describe(net) == before
    assert torch.allclose(logits(compact(net)), logits(net), atol=1e-5)


def test_a_net_without_an_attention_loses_neurons():
    net = rows_net()
    zero(sites(net, 0)["up"], slice(0, 10))
    parts = sublayers(net)
    layers = torch.tensor([[0.0], [1.0]])
    cut_closed(net, {"attention_layer": layers})
    assert [part.last for part in cuttable(net)] == [part.last for part in parts[1:]]
    fused = compact(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-5)
    assert fused.get_submodule(parts[1].last).in_features == 54
