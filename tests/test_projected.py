"""SP3's training form: nothing changes when it is put in, nor when it is multiplied out; all weights count."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.budget import count_params, dense_site_params
from lit_compress.errors import UserError
from lit_compress.export.fuse import fuse
from lit_compress.layers import NarrowNorm, ProjectedLinear, ProjectedNorm
from lit_compress.projected import (
    DIMENSIONS,
    GATES,
    Bases,
    Places,
    gate_shapes,
    gated_size,
    identity_bases,
    insert_projections,
)
from lit_compress.surgery import load_net, save_net

INSERTED = ["bert", "roberta", "electra", "distilbert", "deberta-v2"]
FUSED = INSERTED
SAME_WIDTH = {"electra": {"embedding_size": 32}}


def net_of(family, dtype=torch.float64, **settings):
    """A net whose LayerNorms and biases are not trivial."""
    net = make_net(family, **SAME_WIDTH.get(family, {}) | settings).eval().to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.add_((0.3 * noise if p.ndim == 1 else 0.15 * noise).to(dtype))
    return net


def logits(net, **settings):
    batch = make_batch(**settings)
    with torch.no_grad():
        return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def random_bases(net, seed=0):
    """Orthogonal axes, and any pair of matrices that are each other's inverse for queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    d, heads, count = net.config.hidden_size, net.config.num_attention_heads, net.config.num_hidden_layers

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    mixes = [torch.eye(d // heads).double() + 0.2 * draw(heads, d // heads, d // heads) for _ in range(count)]
    return Bases(
        [torch.linalg.qr(draw(d, d))[0] for _ in range(2 * count + 1)],
        mixes,
        [torch.linalg.inv(mix).mT for mix in mixes],
        [torch.linalg.qr(draw(heads, d // heads, d // heads))[0] for _ in range(count)],
    )


@torch.no_grad()
def disturb(net, gates=GATES, skip=0, kill=()):
    """Gates of any value with zeros, projections that were trained, shifts that are not zero; return what is kept.

    ``kill``: (gate, group) whose units go, but one of a dimension's.
    """
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, (ProjectedNorm, ProjectedLinear)):
            for name in ("p_in", "p_out", "projection", "shift", "scale", "offset"):
                value = getattr(module, name, None)
                if value is not None:
                    value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype))
    kept, z = {}, {}
    for name, (groups, size) in gate_shapes(net, gates, skip).items():
        kept[name] = torch.rand(groups, size, generator=generator) < 0.6
        if name in DIMENSIONS:
            kept[name][:, 2] = True
        for gate, group in kill:
            if gate == name:
                kept[name][group] = False
                kept[name][group, 2:3] = name in DIMENSIONS
        values = kept[name] * (0.1 + 0.9 * torch.rand(groups, size, generator=generator))
        z[name] = values.repeat(1, net.config.num_attention_heads if name in ("qk", "vo") else 1).to(net.dtype)
    Places(net, gates, skip).put(z)
    return kept


@pytest.mark.parametrize("make", [identity_bases, random_bases])
@pytest.mark.parametrize("family", INSERTED)
def test_insertion_changes_nothing(family, make):
    net = net_of(family)
    expected = logits(net)
    insert_projections(net, make(net))
    assert torch.allclose(logits(net), expected, atol=1e-9)
    assert torch.allclose(logits(net.float()), expected.float(), atol=1e-5)


@pytest.mark.parametrize(
    "kill",
    [(), [("head", 0)], [("head", 0), ("head", 1), ("mha", 1)], [("ffn_layer", 0), ("mha", 0)],
     [("hidden", i) for i in range(5)], [("qk", 0), ("vo", 1), ("ffn", 1)]],
)  # fmt: skip
@pytest.mark.parametrize("family", FUSED)
def test_fused_is_the_training_form(family, kill, tmp_path):
    """Soft values, zeros; dead heads, attentions, layers; one direction left somewhere."""
    net = net_of(family)
    insert_projections(net, random_bases(net))
    kept = disturb(net, kill=kill)
    expected = logits(net)
    fused = fuse(net)
    assert not any(isinstance(m, (ProjectedNorm, ProjectedLinear)) for m in fused.modules())
    assert torch.allclose(logits(fused), expected, atol=1e-9)
    assert torch.allclose(logits(fused.float()), expected.float(), atol=1e-5)
    save_net(fused, tmp_path)
    assert torch.equal(logits(load_net(tmp_path)), logits(fused))
    assert gated_size(net).count(kept) == count_params(fused).sites
    assert torch.allclose(logits(fused, length=14), logits(net.float(), length=14), atol=1e-5)


@pytest.mark.parametrize("gates", [("hidden",), ("qk", "ffn"), ("vo", "head", "mha", "ffn_layer"), GATES[1:]])
def test_any_gates(gates):
    net = net_of("bert")
    expected = logits(net)
    insert_projections(net, random_bases(net), gates)
    assert torch.allclose(logits(net), expected, atol=1e-9)
    size, kept = gated_size(net, gates), disturb(net, gates)
    fused = fuse(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-9)
    assert (logits(net) - expected).abs().max() > 1e-3
    assert size.count(kept) == count_params(fused).sites
    assert ("hidden" in gates) == any(isinstance(m, NarrowNorm) for m in fused.modules())


def test_the_size_with_nothing_gone():
    """1 + 2 n d^2 / M_0 with residual matrices, 7/6 where the FFN is 4 d wide; 1 without."""
    net = make_net("bert", intermediate_size=128)
    dense = dense_site_params(net)
    size = gated_size(net)
    ones = {name: torch.ones(shape).long() for name, shape in size.shapes.items()}
    assert size.total == dense and 6 * size.count(ones) == 7 * dense
    size = gated_size(net, ("qk", "head"))
    assert size.count({name: torch.ones(shape).long() for name, shape in size.shapes.items()}) == size.total == dense


def test_eq_30_by_loops():
    """Expected density of random probabilities against the printed sums."""
    size = gated_size(make_net("bert"))
    p = {n: torch.rand(*shape, generator=torch.Generator().manual_seed(i)) for i, (n, shape) in
         enumerate(size.shapes.items())}  # fmt: skip
    total = 0.0
    for i in range(2):
        x, m, f = (float(p["hidden"][2 * i + j].sum()) for j in range(3))
        for head in p["head"][i]:
            for q in p["qk"][i]:
                total += 2 * x * float(head * q * p["mha"][i])
            for v in p["vo"][i]:
                total += (x + m) * float(head * v * p["mha"][i])
        total += float(p["ffn"][i].sum() * p["ffn_layer"][i]) * (m + f) + x * m + m * f
    assert float(size({n: v.sum(1) for n, v in p.items()})) == pytest.approx(total, rel=1e-5)


def test_the_authors_norm():
    """LayerNorm padded with zeros: fused in closed form; not the original net; three sites are left out."""
    net = net_of("bert")
    expected = logits(net)
    bases = random_bases(net)
    insert_projections(net, bases, norm="padded_layernorm", skip=3)
    assert (logits(net) - expected).abs().max() > 1e-3
    kept = disturb(net, skip=3)
    assert len(kept["hidden"]) == 2
    fused = fuse(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-9)
    assert gated_size(net, skip=3).count(kept) == count_params(fused).sites


def test_families_that_cannot():
    with pytest.raises(UserError, match="cannot project 'opt'; it can: bert"):
        insert_projections(make_net("opt"), random_bases(make_net("bert")))
    for settings in ({"conv_kernel_size": 3, "conv_act": "gelu"}, {"share_att_key": False}):
        with pytest.raises(UserError, match="cannot project a DeBERTa with a convolution"):
            insert_projections(make_net("deberta-v2", **settings), random_bases(make_net("bert")))
    with pytest.raises(UserError, match="embeddings of the hidden states' width 32, this net's have 16"):
        insert_projections(make_net("electra"), random_bases(make_net("bert")))


def test_torch_export_with_other_shapes():
    """Also with a dead head, attention and feed-forward network; batch and length stay free."""
    net = net_of("bert", torch.float32)
    insert_projections(net, random_bases(net))
    disturb(net, kill=[("head", 0), ("mha", 1), ("ffn_layer", 1)])
    fused = fuse(net)
    given, other = ({n: make_batch(*size)[n] for n in ("input_ids", "attention_mask")} for size in ((4, 9), (3, 17)))
    free = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=60)}
    program = torch.export.export(fused, (), given, dynamic_shapes=dict.fromkeys(given, free))
    assert torch.allclose(program.module()(**other).logits, fused(**other).logits, atol=1e-6)


def test_a_bias_of_keys_changes_nothing_in_bert():
    """It adds the same to all scores of a query; it is kept all the same, DeBERTa needs it."""
    net = net_of("bert")
    expected = logits(net)
    with torch.no_grad():
        for layer in net.bert.encoder.layer:
            layer.attention.self.key.bias.zero_()
    assert torch.allclose(logits(net), expected, atol=1e-9)
