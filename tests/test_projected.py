"""SP3's training form: nothing changes when it is put in, nor when it is multiplied out; all weights count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import VARIANTS, make_batch, make_net

from lit_compress.budget import count_params, dense_site_params
from lit_compress.errors import UserError
from lit_compress.export.fuse import fuse
from lit_compress.layers import Junction, NarrowNorm, ProjectedLinear, ProjectedNorm, StreamBlock, StreamNorm
from lit_compress.projected import (
    DIMENSIONS,
    GATES,
    Bases,
    Form,
    Places,
    gate_shapes,
    gated_size,
    has_head_projections,
    identity_bases,
    insert_projections,
)
from lit_compress.streams import layout
from lit_compress.surgery import describe, load_net, save_net

ENCODERS = ["bert", "roberta", "electra", "distilbert", "deberta-v2"]
# hidden states keep their basis
FIXED = {"albert": ("albert", {}), "electra-small": ("electra", {"embedding_size": 16}),
         **{name: VARIANTS[name] for name in ("albert-groups", "opt-350m", "deberta-v2-conv")}}  # fmt: skip
FAMILIES = [*ENCODERS, "bart", "opt", "llama", *FIXED]
# an epsilon that is seen
SETTINGS = {"bert": {"layer_norm_eps": 0.05}, "electra": {"embedding_size": 32}, "bart": {"scale_embedding": True},
            "llama": {"rms_norm_eps": 0.05}}  # fmt: skip
TRAINED = (Junction, ProjectedLinear, ProjectedNorm, StreamNorm)
LLAMA = ("hidden", "ffn")


def form_of(family, group=1):
    """The form with all the gates that a family can have."""
    return Form(LLAMA if family == "llama" else GATES[1:] if family in FIXED else GATES, group=group)


def net_of(family, dtype=torch.float64, **settings):
    """A net whose LayerNorms and biases are not trivial."""
    kind, own = FIXED.get(family, (family, {}))
    net = make_net(kind, **SETTINGS.get(kind, {}) | own | settings).eval().to(dtype)
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


def random_bases(net, group=1, seed=0):
    """Orthogonal axes, and any pair of matrices that are each other's inverse for queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    d, heads, parts = net.config.hidden_size, net.config.num_attention_heads, layout(net, group)
    count = len(parts.attentions) * has_head_projections(net)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    mixes = [torch.eye(d // heads).double() + 0.2 * draw(heads, d // heads, d // heads) for _ in range(count)]
    return Bases(
        [torch.linalg.qr(draw(d, d))[0] for _ in range(len(parts.turnable))],
        mixes,
        [torch.linalg.inv(mix).mT for mix in mixes],
        [torch.linalg.qr(draw(heads, d // heads, d // heads))[0] for _ in range(count)],
    )


@torch.no_grad()
def disturb(net, form=Form(), kill=()):
    """Gates of any value with zeros, projections that were trained, shifts that are not zero; return what is kept.

    ``kill``: (gate, group) whose units go, but one of a dimension's.
    """
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, TRAINED):
            for name in ("p_in", "p_out", "projection", "shift", "scale", "offset", "weight"):
                value = getattr(module, name, None)
                if value is not None:
                    value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype))
    kept, z = {}, {}
    for name, (groups, size) in gate_shapes(net, form).items():
        kept[name] = torch.rand(groups, size, generator=generator) < 0.6
        if name in DIMENSIONS:
            kept[name][:, 2] = True
        for gate, group in kill:
            if gate == name and group < groups:
                kept[name][group] = False
                kept[name][group, 2:3] = name in DIMENSIONS
        values = kept[name] * (0.1 + 0.9 * torch.rand(groups, size, generator=generator))
        z[name] = values.repeat(1, net.config.num_attention_heads if name in ("qk", "vo") else 1).to(net.dtype)
    Places(net, form).put(z)
    return kept


@pytest.mark.parametrize("heads", ["dense", "block"])
@pytest.mark.parametrize("make", [identity_bases, random_bases])
@pytest.mark.parametrize("family", FAMILIES)
def test_insertion_changes_nothing(family, make, heads):
    net = net_of(family)
    expected = logits(net)
    insert_projections(net, make(net), replace(form_of(family), heads=heads))
    # Llama's own norms are computed in float32
    assert torch.allclose(logits(net), expected, atol=1e-9 if family != "llama" else 1e-5)
    assert torch.allclose(logits(net.float()), expected.float(), atol=1e-5)


@pytest.mark.parametrize(
    "kill",
    [(), [("head", 0)], [("head", 0), ("head", 1), ("mha", 1)], [("ffn_layer", 0), ("mha", 0)],
     [("hidden", i) for i in range(4)], [("qk", 0), ("vo", 1), ("ffn", 1)]],
)  # fmt: skip
@pytest.mark.parametrize(
    ("family", "heads"), [*((family, "dense") for family in FAMILIES), ("bert", "block"), ("deberta-v2", "block")]
)
def test_fused_is_the_training_form(family, heads, kill, tmp_path):
    """Soft values, zeros; dead heads, attentions, layers; one direction left somewhere."""
    net, form = net_of(family), replace(form_of(family), heads=heads)
    insert_projections(net, random_bases(net), form)
    kept = disturb(net, form, kill=kill)
    check_fused(net, form, kept, tmp_path)


def check_fused(net, form, kept, folder):
    """The fused net computes what the training form does, also from disk, and is as large as counted."""
    expected = logits(net)
    fused = fuse(net)
    assert not any(isinstance(m, TRAINED) for m in fused.modules())
    assert torch.allclose(logits(fused), expected, atol=1e-9)
    assert torch.allclose(logits(fused.float()), expected.float(), atol=1e-5)
    save_net(fused, folder)
    assert torch.equal(logits(load_net(folder)), logits(fused))
    assert gated_size(net, form).count(kept) == count_params(fused).sites
    assert torch.allclose(logits(fused, length=14), logits(net.float(), length=14), atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_blocks_that_share_a_basis(family, group, tmp_path):
    """Three layers: six blocks in groups; exact as a whole, and with directions left out."""
    net, form = net_of(family, num_hidden_layers=3), form_of(family, group)
    expected = logits(net)
    insert_projections(net, random_bases(net, group), form)
    assert torch.allclose(logits(net), expected, atol=1e-9 if family != "llama" else 1e-5)
    assert sum(isinstance(m, Junction) for m in net.modules()) == -(-6 // group) - 1
    assert sum(isinstance(m, StreamBlock) for m in net.modules()) == 3
    check_fused(net, form, disturb(net, form), tmp_path)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_the_stream_by_loops(family):
    """Where norms stand before the blocks: x' = z_g' U_g'^T U_g x + z_g' U_g'^T W_out block(W_in diag(gamma) U_g z_g
    rms(x)), with one feed-forward network by hand."""
    net, form = net_of(family), form_of(family)
    bases = random_bases(net)
    host = next(m for name, m in net.named_modules() if name.endswith("layers.0"))
    opt = family == "opt"
    norm = host.final_layer_norm if opt else host.post_attention_layernorm
    gamma, beta = norm.weight.detach().clone(), norm.bias.detach().clone() if opt else torch.zeros(32).double()
    linears = [host.fc1, host.fc2] if opt else [host.mlp.gate_proj, host.mlp.up_proj, host.mlp.down_proj]
    matrices = [(layer.weight.detach().clone(), layer.bias) for layer in linears]
    insert_projections(net, bases, form)
    z = {n: torch.rand(shape, generator=torch.Generator().manual_seed(5)).double() for n, shape in
         gate_shapes(net, form).items()}  # fmt: skip
    values = {n: v.repeat(1, 4 if n in ("qk", "vo") else 1) for n, v in z.items()}
    Places(net, form).put(values)
    x = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    here, there = bases.sites[1], bases.sites[2]
    seen = z["hidden"][1] * x
    y = (
        z["hidden"][1]
        * seen
        / (seen.square().mean(-1, keepdim=True) + (norm.eps if opt else norm.variance_epsilon)).sqrt()
    )
    read = (y @ here.mT) * gamma + beta
    inner = [read @ w.mT + (0 if b is None else b) for w, b in matrices[:-1]]
    activated = inner[0].relu() if opt else torch.nn.functional.silu(inner[0]) * inner[1]
    w, b = matrices[-1]
    out = (activated * z["ffn"][0]) @ w.mT + (0 if b is None else b)
    if opt:
        out = (out - out.mean(-1, keepdim=True)) * z["ffn_layer"][0]
    expected = z["hidden"][2] * (seen @ here.mT @ there + out @ there)

    norm = host.final_layer_norm if opt else host.post_attention_layernorm
    turned = norm(x)
    turned = host.fc2(host.activation_fn(host.fc1(turned))) if opt else host.mlp(turned)
    assert torch.allclose(z["hidden"][2] * (host.end(x) + turned), expected, atol=1e-9)


def test_blocks_are_dense_without_other_heads(tmp_path):
    """As many times fewer weights as there are heads; the structure makes the same layer again."""
    dense, block = (insert_projections(net, random_bases(net), Form(heads=heads)) for net, heads in
                    ((net_of("bert"), "dense"), (net_of("bert"), "block")))  # fmt: skip
    found = {name: (module, dense.get_submodule(name)) for name, module in block.named_modules()
             if isinstance(module, ProjectedLinear) and module.side}  # fmt: skip
    assert len(found) == 8
    for small, large in found.values():
        assert small.projection.shape == (4, 8, 8) and large.projection.shape == (32, 32)
        assert torch.equal(small.matrix(), large.projection)
    disturb(block)
    save_net(block.float(), tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(block) and torch.equal(logits(again), logits(block))


@pytest.mark.parametrize("gates", [("hidden",), ("qk", "ffn"), ("vo", "head", "mha", "ffn_layer"), GATES[1:]])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "bart", "opt"])
def test_any_gates(family, gates):
    net = net_of(family)
    expected = logits(net)
    insert_projections(net, random_bases(net), Form(gates))
    assert torch.allclose(logits(net), expected, atol=1e-9)
    size, kept = gated_size(net, Form(gates)), disturb(net, Form(gates))
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
    size = gated_size(net, Form(("qk", "head")))
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
    form = Form(skip=3, norm="padded_layernorm")
    insert_projections(net, bases, form)
    assert (logits(net) - expected).abs().max() > 1e-3
    kept = disturb(net, form)
    assert len(kept["hidden"]) == 2
    fused = fuse(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-9)
    assert gated_size(net, form).count(kept) == count_params(fused).sites


def test_families_that_cannot():
    def refused(message, family="bert", form=Form(), **settings):
        with pytest.raises(UserError, match=message):
            insert_projections(make_net(family, **settings), random_bases(make_net("bert")), form)

    refused("cannot project 't5'; it can: bert", "t5")
    refused("cannot project a DeBERTa whose positions have projections of their own", "deberta-v2", share_att_key=False)
    others = r"\); it has qk, vo, ffn, head, mha, ffn_layer"
    refused(r"prune.gates: albert has no hidden \(its blocks run more than once, first on the emb.*" + others, "albert")
    refused(r"has no hidden \(a convolution reads" + ".*" + others, "deberta-v2", conv_kernel_size=3, conv_act="gelu")
    refused(r"has no hidden \(its embeddings have 16 dimensions, its hidden states 32" + others, "electra")
    refused(r"has no hidden \(its embeddings have 16 dim.*" + others, "opt", word_embed_proj_dim=16)
    refused(r"opt has no hidden \(do_layer_norm_before is False" + others, "opt", do_layer_norm_before=False)
    refused(r"encoder_ffn_dim and decoder_ffn_dim alike, not \[64, 48\]", "bart", decoder_ffn_dim=48)
    refused("encoder_attention_heads and decoder_attention_heads", "bart", decoder_attention_heads=2)
    refused("prune.gates: llama has no qk, vo, head, mha, ffn_layer; it has hidden, ffn", "llama")
    refused("prune.group: 2; the norms of bert stand after the blocks, valid is 1", form=Form(group=2))
    refused("prune.group: 0 is below 1", "opt", Form(group=0))
    refused("prune.group: 2 share bases .* have no gate; valid: 1", "opt", Form(("ffn",), group=2))
    refused("prune.norm: padded_layernorm .* valid: rms", "opt", Form(norm="padded_layernorm"))
    refused("prune.skip_sites: 4 of 4 sites; valid: 0 to 3", "opt", Form(skip=4))


def test_a_bias_of_keys_changes_nothing_in_bert():
    """It adds the same to all scores of a query; it is kept all the same, DeBERTa needs it."""
    net = net_of("bert")
    expected = logits(net)
    with torch.no_grad():
        for layer in net.bert.encoder.layer:
            layer.attention.self.key.bias.zero_()
    assert torch.allclose(logits(net), expected, atol=1e-9)
