"""SP3's training form: nothing changes when it is put in, nor when it is multiplied out; all weights count."""

import pytest
import torch
from helpers import FAMILIES, IN_FLOAT32, TRAINED, as_deployed, disturb, gates_of, logits, net_of, random_bases
from tiny import make_batch, make_net

from lit_compress.calibration.second_moments import bases_of, collect_grams
from lit_compress.layers import BasisChange, StreamBlock
from lit_compress.models.accounting import count_params, flops
from lit_compress.models.backbones import empty_net
from lit_compress.models.projected.gates import GATES, GateSlots, even_units, gated_size, possible_gates
from lit_compress.models.projected.projections import identity_bases, insert_projections, narrowed
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, without_values
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize(
    ("family", "make"), [*((family, random_bases) for family in FAMILIES), ("bert", identity_bases)]
)
def test_insertion_changes_nothing(family, make):
    net = net_of(family)
    expected = logits(net)
    insert_projections(net, make(net), gates_of(family))
    assert torch.allclose(logits(net), expected, atol=1e-5 if family in IN_FLOAT32 else 1e-9)
    assert torch.allclose(logits(net.float()), expected.float(), atol=1e-5)


@pytest.mark.parametrize(
    "kill",
    [[("heads", 0), ("heads", 1), ("attention_layer", 1)], [("ffn_layer", 0), ("attention_layer", 0), ("qk", 0)],
     [*(("hidden", i) for i in range(4)), ("vo", 1), ("neurons", 1)]],
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_the_training_form(family, kill, tmp_path):
    """Soft values, zeros; dead heads, attentions, layers; one direction left somewhere."""
    net, gates = net_of(family), gates_of(family)
    insert_projections(net, random_bases(net), gates)
    kept = disturb(net, gates, kill=kill)
    check_fused(net, gates, kept, tmp_path)


def check_fused(net, gates, kept, folder):
    """The fused net computes what the training form does, also from disk, and is as large as counted."""
    expected = logits(net)
    fused = as_deployed(net)
    assert not any(isinstance(m, TRAINED) for m in fused.modules())
    assert torch.allclose(logits(fused), expected, atol=1e-9)
    assert torch.allclose(logits(fused.float()), expected.float(), atol=1e-5)
    save_net(fused, folder)
    assert torch.equal(logits(load_net(folder)), logits(fused))
    assert gated_size(net, gates).count(kept) == count_params(fused).sites
    assert torch.allclose(logits(fused, length=14), logits(net.float(), length=14), atol=1e-5)


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_every_sublayer_has_a_basis(family, tmp_path):
    """Three layers, six sub-layers; exact as a whole, and with directions left out."""
    net, gates = net_of(family, num_hidden_layers=3), gates_of(family)
    expected = logits(net)
    insert_projections(net, random_bases(net), gates)
    assert torch.allclose(logits(net), expected, atol=1e-5 if family in IN_FLOAT32 else 1e-9)
    assert sum(isinstance(m, BasisChange) for m in net.modules()) == 5
    assert sum(isinstance(m, StreamBlock) for m in net.modules()) == 3
    check_fused(net, gates, disturb(net, gates), tmp_path)


def test_eq_30_by_loops():
    """Expected density of random probabilities against the printed sums."""
    size = gated_size(make_net("bert"), GATES)
    p = {n: torch.rand(*shape, generator=torch.Generator().manual_seed(i)) for i, (n, shape) in
         enumerate(size.shapes.items())}  # fmt: skip
    total = 0.0
    for i in range(2):
        x, m, f = (float(p["hidden"][2 * i + j].sum()) for j in range(3))
        for head in p["heads"][i]:
            for q in p["qk"][i]:
                total += 2 * x * float(head * q * p["attention_layer"][i])
            for v in p["vo"][i]:
                total += (x + m) * float(head * v * p["attention_layer"][i])
        total += float(p["neurons"][i].sum() * p["ffn_layer"][i]) * (m + f) + x * m + m * f
    assert float(size({n: v.sum(1) for n, v in p.items()})) == pytest.approx(total, rel=1e-5)


def test_families_that_cannot():
    def refused(message, family, **settings):
        with pytest.raises(UserError, match=message):
            possible_gates(make_net(family, **settings))

    others = "; nearest: SecondOrder, or bert, roberta"
    refused(rf"of 'deberta-v2' cannot be projected \(its positions go through .*\){others}", "deberta-v2")
    refused(r"encoder_ffn_dim and decoder_ffn_dim alike, not \[64, 48\]", "bart", decoder_ffn_dim=48)
    refused("encoder_attention_heads and decoder_attention_heads", "bart", decoder_attention_heads=2)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("albert", {}, "its blocks run more than once, first on the embeddings"),
        ("electra", {}, "its embeddings have 16 dimensions, its hidden states 32"),
        ("opt", {"word_embed_proj_dim": 16}, "its embeddings have 16 dimensions, its hidden states 32"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("modernbert", {}, "its first attention reads the embeddings without a norm"),
    ],
)
def test_hidden_states_that_keep_their_basis_have_no_gate(family, settings, reason):
    net = make_net(family, **settings)
    assert possible_gates(net) == (("neurons",) if family == "modernbert" else GATES[1:])
    assert residual_stream(net).fixed == reason


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_gates(family):
    net = net_of(family)
    assert possible_gates(net) == gates_of(family)
    insert_projections(net, random_bases(net), gates_of(family))
    assert possible_gates(net) == gates_of(family)


@pytest.mark.parametrize("family", ["opt", "phi3"])
def test_a_block_drops_in_training_what_the_dense_one_drops(family):
    net = make_net(family, dropout=0.5).train()

    def drawn(seed):
        torch.manual_seed(seed)
        return logits(net)

    expected, base = drawn(0), net.base_model
    for block in getattr(base, "decoder", base).layers:
        StreamBlock.adopt(block)
    assert torch.allclose(drawn(0), expected, atol=1e-6)
    assert not torch.allclose(drawn(1), expected, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_outline_has_the_shapes_of_the_folded_net(family):
    gates, net = gates_of(family), net_of(family)
    kept = even_units(gated_size(net, gates), 0.5)
    empty = without_values(lambda: empty_net(net.config))
    outline = narrowed(empty, gates, kept, identity_bases(empty))
    assert count_params(outline).sites == gated_size(net, gates).count(kept)
    folded = narrowed(net, gates, kept, identity_bases(net))
    assert describe(outline) == describe(folded) and flops(outline, 12) == flops(folded.float(), 12)
    shapes = [{name: value.shape for name, value in of.state_dict().items()} for of in (outline, folded)]
    assert shapes[0] == shapes[1]


def turned(net, bases, width):
    """Keep the first ``width`` directions of every site."""
    insert_projections(net, bases, ("hidden",))
    z = (torch.arange(net.config.hidden_size) < width).to(net.dtype)
    GateSlots(net, ("hidden",)).set({"hidden": z.expand(len(bases.sites), -1)})
    return net


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
        grams = collect_grams(net, [make_batch(16, 12)], 10**6)
        bases = bases_of(grams, centred=False) if own else random_bases(net)
        losses.append(float((logits(turned(net, bases, 12)) - expected).abs().max()))
    assert losses[0] < 1e-5 and losses[1] > 1e-2
