"""Narrow nets that are ordinary ones; wider, with zeros. That they are the training form: test_projected.py."""

import pytest
import torch
from helpers import LLAMA, as_deployed, disturb, logits, net_of, random_bases
from tiny import VARIANTS, make_batch

from lit_compress.calibration.second_moments import collect_grams
from lit_compress.export.modelling import as_ordinary
from lit_compress.methods.sp3.stage import bases_of
from lit_compress.models.projected.gates import GateSlots, ProjectionSpec
from lit_compress.models.projected.insert import insert_projections

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
