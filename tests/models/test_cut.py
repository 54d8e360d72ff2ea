"""Gates in real nets: the value they have where they act, and the smaller net that computes the same."""

import copy
import json

import helpers
import pytest
import torch
from helpers import cached_logits, logits, random_z
from tiny import ALL, DECODERS, VARIANTS, make_batch, make_inputs, make_net
from torch import nn
from transformers import AutoModelForSequenceClassification

from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.layers import LowRankSparseLinear
from lit_compress.layers.training.gated import GatedNorm
from lit_compress.methods.cofi.gates import gate_net, gated_size, possible_gates, set_gates
from lit_compress.methods.cofi.with_losparse import COARSE
from lit_compress.models import accounting as budget
from lit_compress.models.architectures import ARCHITECTURES
from lit_compress.models.cut import close_empty_sublayers, cut_closed, cut_units, remove_constant_units
from lit_compress.models.residual_stream import stream_width
from lit_compress.models.sites import cuttable, find_sites, sublayers
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, factorize

BLOCK = "bert.encoder.layer.{}."
FAMILIES = [family for family, record in ARCHITECTURES.items() if record.has_removable_sublayers]
CASES = [*((family, {}) for family in FAMILIES), ("deberta-v2", {"share_att_key": False}),
         ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}), VARIANTS["modernbert-biases"],
         ("t5", {"d_kv": 16, "feed_forward_proj": "gated-gelu"})]  # fmt: skip


DEPTH = {
    "distilbert": {"n_layers": 4}, "bart": {"encoder_layers": 2, "decoder_layers": 2},
    "t5": {"num_layers": 2, "num_decoder_layers": 2},
}  # fmt: skip


def net_of(family, **settings):
    """Four layers."""
    return helpers.net_of(family, torch.float32, **DEPTH.get(family, {"num_hidden_layers": 4}) | settings)


def hidden_states(net):
    return net(**make_inputs(), output_hidden_states=True).hidden_states


CUTS = [*((*case, None) for case in CASES), *((*case, COARSE) for case in CASES)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "gates"), CUTS)
def test_gated_is_cut_is_exported_is_reloaded(family, settings, gates, tmp_path):
    net = net_of(family, **settings)
    gates = gates or possible_gates(net)
    before, z, size = logits(net), random_z(net, gates), gated_size(net, gates)
    gate_net(net, gates)
    assert torch.equal(logits(net), before)  # no values yet
    set_gates(net, {name: torch.ones_like(value) for name, value in z.items()}, deterministic=True)
    assert torch.allclose(logits(net), before, atol=1e-6)
    set_gates(net, z, deterministic=True)
    expected = logits(net)
    assert not torch.allclose(expected, before, atol=1e-3)
    cut_closed(net, z)
    assert torch.allclose(logits(net), expected, atol=1e-5)
    assert budget.count_params(net).sites == size.count({name: value > 0 for name, value in z.items()})
    assert budget.stored_density(net) == size.count({name: value > 0 for name, value in z.items()}) / size.total
    save_net(net, tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(net) and torch.equal(logits(again), logits(net))
    fused = fuse(again)
    assert torch.allclose(logits(fused), expected, atol=1e-5) and describe(fused) == describe(again)
    write_model(fused, tmp_path)
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert torch.allclose(logits(alone), expected, atol=1e-5)
    assert budget.flops(net, 16) < budget.flops(net_of(family, **settings), 16)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"bart", "t5"}))
def test_all_sublayers_closed_gives_the_embeddings(family):
    net = net_of(family)
    z = {name: torch.zeros(4, 1) for name in ("attention_layer", "ffn_layer")}
    cut_closed(net, z)
    states = hidden_states(net)
    last = states[1:4] if ARCHITECTURES[family].pre_norm else states[1:]  # the last one has the last norm besides
    assert len(states) == 5 and all(torch.equal(state, states[0]) for state in last)
    assert budget.count_params(net).sites == 0 and find_sites(net) == []


def test_a_stream_without_sublayers_is_cut_too():
    net = net_of("bert")
    z = {name: torch.zeros(4, 1) for name in ("attention_layer", "ffn_layer")}
    cut_closed(net, z | {"hidden": (torch.arange(32) < 20).float()[None]})
    assert stream_width(net) == 20 and logits(net).isfinite().all()


def test_canonical():
    """A sub-layer without units is closed, one that is closed has no units; twice is once."""
    z = {
        "attention_layer": torch.tensor([[0.9], [0.8], [0.0]]),
        "heads": torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.7, 0.7]]),
        "neurons": torch.tensor([[0.0, 0.0]]),  # without gates of the sub-layers
    }
    once = close_empty_sublayers(z)
    assert once["attention_layer"].flatten().tolist() == pytest.approx([0.0, 0.8, 0.0])
    assert once["heads"].tolist() == [[0.0, 0.0], [0.5, 0.0], [0.0, 0.0]]
    assert all(torch.equal(close_empty_sublayers(once)[name], once[name]) for name in z)


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
def test_norm_over_open_dimensions(eps):
    """Equal to a LayerNorm over the gathered ones, also when eps matters; gradients too."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(12, eps=eps)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    z = torch.rand(12).clamp_min(0.3) * (torch.arange(12) % 3 > 0)
    open_ = z > 0
    x = torch.randn(3, 5, 12) * open_
    gated = GatedNorm(norm)
    gated.z, gated.share = z, 8 / 12
    inner = nn.functional.layer_norm(x[..., open_], (8,), norm.weight[open_], norm.bias[open_], eps) * z[open_]
    y = gated(x)
    assert torch.allclose(y[..., open_], inner, atol=1e-6) and (y[..., ~open_] == 0).all()
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    coefficients = torch.randn(3, 5, 12)
    (gated(first) * coefficients).sum().backward()
    inner = nn.functional.layer_norm(second[..., open_], (8,), norm.weight[open_], norm.bias[open_], eps) * z[open_]
    (inner * coefficients[..., open_]).sum().backward()
    assert torch.allclose(first.grad[..., open_], second.grad[..., open_], atol=1e-5)
    gated.z_layer = torch.zeros(1)
    assert torch.equal(gated(x), x)
    gated.z_layer = torch.full((1,), 0.2)
    assert torch.equal(gated(x), y)


def test_gates_reach_gradients():
    """Every gate gets a gradient from the logits, without a value that is copied to the host."""
    net = net_of("bert")
    gates = possible_gates(net)
    z = {name: torch.full(shape, 0.9, requires_grad=True) for name, shape in gated_size(net, gates).shapes.items()}
    gate_net(net, gates)
    set_gates(net, z)
    net(**make_inputs()).logits.square().sum().backward()
    assert all((value.grad != 0).any(-1).all() for value in z.values())


def test_factors_and_kept_rows_are_cut_too():
    """Level 1 and 2 of CoFi over LoSparse's layers: gated == cut == fused, with sizes that only the structure knows."""
    net = net_of("bert")
    factorize(net, {site.name: 3 for site in find_sites(net)},
              lambda _, w, rank: (0.1 * torch.randn(len(w), rank), 0.1 * torch.randn(rank, w.shape[1])),
              LowRankSparseLinear)  # fmt: skip
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, LowRankSparseLinear):
                module.sparse[::2] = 0
    z = random_z(net, COARSE)
    gate_net(net, COARSE)
    set_gates(net, z, deterministic=True)
    expected = logits(net)
    cut_closed(net, z)
    assert torch.allclose(logits(net), expected, atol=1e-5)
    fused = fuse(net)
    assert torch.allclose(logits(fused), expected, atol=1e-5)
    assert sum(spec["kind"] == "nothing" for spec in json.loads(json.dumps(describe(fused))).values()) == 9


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in DECODERS])
def test_cached_generation_after_removal(family):
    """Without the first attention, and two heads: with a cache as without (it counts from the first attention left)."""
    net = make_net(family, "plain_text", num_hidden_layers=3, initializer_range=0.2).eval()
    heads = torch.tensor([[1.0] * 4, [1.0, 0.0, 0.7, 0.0], [1.0] * 4])
    cut_closed(net, {"attention_layer": torch.tensor([[0.0], [1.0], [1.0]]), "heads": heads})
    torch.testing.assert_close(*cached_logits(net), rtol=0, atol=1e-5)


# ---------------------------------------------------------------- constant heads and neurons (also test_row_sizes.py)


def rows_net():
    """A net of rank-0 layers with random values, and its layers by name in the first block."""
    net = make_net("bert", dropout=0.0).eval()
    factorize(net, {site.name: 0 for site in find_sites(net)}, None, LowRankSparseLinear)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=0.3)
    return net


def zero(net, name, rows, layer=0):
    with torch.no_grad():
        net.get_submodule(f"{BLOCK.format(layer)}{name}").sparse[rows] = 0


def test_nothing_to_cut():
    """Dense nets, nets with a low-rank part, and zeros that are not of whole heads stay as they are."""
    net = make_net()
    with torch.no_grad():
        net.get_submodule(f"{BLOCK.format(0)}intermediate.dense").weight[:5] = 0
    assert describe(fuse(net)) == {}
    net = rows_net()
    zero(net, "attention.self.value", slice(0, 7))
    zero(net, "attention.self.query", slice(None))
    before = describe(net)
    remove_constant_units(net)
    assert describe(net) == before
    assert torch.allclose(logits(fuse(net)), logits(net), atol=1e-5)


def test_a_net_without_an_attention_loses_neurons():
    net = rows_net()
    zero(net, "intermediate.dense", slice(0, 10))
    parts = sublayers(net)
    cut_closed(net, {"attention_layer": torch.tensor([[0.0], [1.0]])})
    assert [part.last for part in cuttable(net)] == [part.last for part in parts[1:]]
    fused = fuse(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-5)
    assert fused.get_submodule(parts[1].last).in_features == 54


def without_sublayers(net, flags):
    """Copies of the model without the sub-layers of some flags: removed, and with their last bias alone."""
    small, constant = copy.deepcopy(net), copy.deepcopy(net)
    gone = [part for part, flag in zip(sublayers(net, gated=False), flags, strict=True) if not flag]
    for part in gone:
        constant.get_submodule(part.last).register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    cut_units(small, {part.last: torch.zeros(part.count(net), dtype=torch.bool) for part in gone}, whole=True)
    return small, constant


FREE = [name for name in ALL if not name.startswith(("albert", "gemma", "opt-350m", "qwen3-s"))]


@pytest.mark.parametrize("name", FREE)
def test_a_removed_sublayer_of_every_family_gives_its_bias_alone(name, tmp_path):
    family, settings = ALL[name]
    net = make_net(family, dropout=0.0, **settings | {"initializer_range": 0.1}).eval()
    count = len(sublayers(net, gated=False))
    for kept in (range(0, count, 2), range(count - 1)):
        small, constant = without_sublayers(net, [i in kept for i in range(count)])
        assert torch.allclose(logits(small), logits(constant), atol=1e-5)
        save_net(small, tmp_path)
        assert torch.equal(logits(load_net(tmp_path)), logits(small))


@pytest.mark.parametrize("family", ["bart", "t5", *(name for name in DECODERS if not name.startswith("gemma"))])
def test_a_decoder_with_one_self_attention_writes_the_same_with_a_cache(family):
    net = make_net(family, "xsum" if family in ("bart", "t5") else "plain_text", initializer_range=0.2).eval()
    parts = sublayers(net, gated=False)
    last = max(i for i, part in enumerate(parts) if part.cached)
    small, constant = without_sublayers(net, [not part.cached or i == last for i, part in enumerate(parts)])
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    ids = make_batch()["input_ids"][:1]
    written = small.generate(ids, **asked)
    assert torch.equal(written, small.generate(ids, use_cache=False, **asked))
    assert torch.equal(written, constant.generate(ids, use_cache=False, **asked))
