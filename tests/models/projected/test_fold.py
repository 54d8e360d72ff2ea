"""Narrow nets that are ordinary ones; wider, with zeros. That they are the training form: test_projected.py."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import FAMILIES, FIXED, IN_FLOAT32, LLAMA, as_deployed, disturb, form_of, logits, net_of, random_bases
from tiny import VARIANTS, make_batch, make_net

from lit_compress.calibration.second_moments import collect_grams
from lit_compress.export.narrow import as_ordinary, pad_widths
from lit_compress.layers import NarrowLinear, NarrowNorm, SizedLinear
from lit_compress.methods.sp3.bases import bases_of
from lit_compress.models.accounting import density, stored_density
from lit_compress.models.projected.gates import GateSlots, ProjectionSpec
from lit_compress.models.projected.insert import insert_projections
from lit_compress.models.storage import load_net, save_net
from lit_compress.utils.errors import UserError

ONE = ProjectionSpec(("hidden",), group=100)


def turned(net, bases, width, form=ONE):
    """Keep the first ``width`` directions."""
    insert_projections(net, bases, form)
    z = (torch.arange(net.config.hidden_size) < width).to(net.dtype)[None]
    GateSlots(net, form).set({"hidden": z})
    return net


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True, "mlp_bias": True}),
     ("llama", {"head_dim": 16}), ("qwen2", {}), ("qwen3", {}), ("phi3", {}), VARIANTS["qwen3-sliding"]],
)  # fmt: skip
@pytest.mark.parametrize("width", [32, 20, 21])
def test_one_basis_leaves_a_stock_net(family, settings, width, tmp_path):
    net = net_of(family, torch.float32, **settings)
    expected = logits(net)
    turned(net, random_bases(net, 100), width)
    small = as_ordinary(as_deployed(net))
    assert type(small) is type(net) and small.config.hidden_size == -(-width // 4) * 4
    assert torch.allclose(logits(small), logits(net), atol=1e-5)
    assert torch.allclose(logits(small), expected, atol=1e-5) == (width == 32)
    small.save_pretrained(tmp_path)
    assert torch.equal(logits(type(net).from_pretrained(tmp_path)), logits(small))


def test_what_is_no_stock_net():
    for family, form in (
        ("llama", ProjectionSpec(("hidden",), group=2)),
        ("llama", ProjectionSpec(LLAMA, group=100)),
        ("opt", ProjectionSpec()),
        ("modernbert", ProjectionSpec(("neurons",))),
    ):
        net = net_of(family, torch.float32)
        assert as_ordinary(net) is None
        insert_projections(net, random_bases(net, form.group), form)
        disturb(net, form)
        assert as_ordinary(as_deployed(net)) is None


def test_a_stream_of_low_rank_loses_nothing():
    """With the data's own axes; with others it does."""
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(32, 12, generator=generator, dtype=torch.float64))[0]
    low = basis @ basis.T
    losses = []
    for own in (True, False):
        net = net_of("llama")
        with torch.no_grad():
            net.model.embed_tokens.weight.copy_(net.model.embed_tokens.weight @ low)
            for layer in net.model.layers:
                for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    linear.weight.copy_(low @ linear.weight)
        expected = logits(net)
        grams = collect_grams(net, [make_batch(16, 12)], 10**6, group=100)
        bases = bases_of(grams, centred=False)[0] if own else random_bases(net, 100)
        losses.append(float((logits(turned(net, bases, 12)) - expected).abs().max()))
    assert losses[0] < 1e-5 and losses[1] > 1e-2


@pytest.mark.parametrize(
    ("family", "norm", "group"),
    [*((family, "rms", 1) for family in FAMILIES if family not in FIXED), ("bert", "padded_layernorm", 1),
     ("opt", "rms", 3), ("llama", "rms", 2), ("qwen3", "rms", 2)],
)  # fmt: skip
def test_rounded_widths_change_nothing(family, norm, group, tmp_path):
    """All multiples of 8, also where a head, an attention and a feed-forward network are dead; no weight is new."""
    net, form = net_of(family), ProjectionSpec(form_of(family).gates, group=group, norm=norm)
    insert_projections(net, random_bases(net, group), form)
    disturb(net, form, kill=[("heads", 0), ("attention_layer", 1), ("ffn_layer", 1)])
    fused = as_deployed(net)
    for module in fused.modules():
        if isinstance(module, NarrowNorm):
            module.eps = 0.1  # so that it is seen
    rounded = pad_widths(copy.deepcopy(fused), 8)
    assert torch.allclose(logits(rounded), logits(fused), atol=1e-6 if family in IN_FLOAT32 else 1e-12)
    assert torch.allclose(logits(rounded.float()), logits(fused.float()), atol=1e-6)
    widths = [m.features for m in rounded.modules() if isinstance(m, NarrowNorm)]
    assert not any(width % 8 for width in widths) and density(rounded) == density(fused)
    assert all(site.weight.shape == (site.out_features, site.in_features) for site in rounded.modules()
               if isinstance(site, (NarrowLinear, SizedLinear)))  # fmt: skip
    ends = ("intermediate.dense", "lin1", "fc1", "gate_proj", "up_proj")
    ups = [m.out_features for name, m in rounded.named_modules() if name.endswith(ends)]
    assert len(ups) in (2, 4) and not any(width % 8 for width in ups)
    assert stored_density(rounded) > stored_density(fused)
    save_net(rounded, tmp_path)
    assert torch.equal(logits(load_net(tmp_path)), logits(rounded))


def test_what_cannot_be_rounded():
    with pytest.raises(
        UserError, match=r"--round_to 8 is for models with narrow hidden states \(SP3, SliceGPT\); this one"
    ):
        pad_widths(make_net("bert"), 8)
    with pytest.raises(UserError, match="--round_to 0 is below 1"):
        pad_widths(make_net("bert"), 0)


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "distilbert"])
def test_hidden_states_without_room_for_the_next(family, tmp_path):
    """In a family whose sub-layers end in a module of their own, hidden states have their own width and no zeros."""
    net = net_of(family)
    insert_projections(net, random_bases(net))
    disturb(net)
    fused = as_deployed(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-6)
    save_net(fused.float(), tmp_path)
    assert torch.equal(logits(load_net(tmp_path)), logits(fused))
    norms = [module for module in fused.modules() if isinstance(module, NarrowNorm)]
    padded = family == "distilbert"
    for module in norms:
        wide = torch.randn(2, module.in_features + module.features)
        assert module(wide).shape[1] == module.features + module.room * padded
    assert all(module.room for module in norms[:-1]) and all(module.bare != padded for module in norms)
