"""Every Linear of the blocks is a site; nothing else is."""

import pytest
import torch
from tiny import ALL, DECODERS, TINY, VARIANTS, make_batch, make_net
from torch import nn
from unplaced import unplaced

from lit_compress.export.check import check_export
from lit_compress.export.modelling import write_model
from lit_compress.models.sites import blocks, find_sites, shared_inputs
from lit_compress.models.surgery import factorize
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.rank_rule import RankRule

SELF = [f"attention.self.{part}" for part in ("query", "key", "value")]
LLAMA = [*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
LLAMAS = DECODERS[DECODERS.index("llama") :]
BERT = [*SELF, "attention.output.dense", "intermediate.dense", "output.dense"]

# the whole truth: block names and Linears inside a block, in forward order
NAMES = {
    "bert": (["bert.encoder.layer.0", "bert.encoder.layer.1"], BERT),
    "roberta": (["roberta.encoder.layer.0", "roberta.encoder.layer.1"], BERT),
    "camembert": (["roberta.encoder.layer.0", "roberta.encoder.layer.1"], BERT),
    "xlm-roberta": (["roberta.encoder.layer.0", "roberta.encoder.layer.1"], BERT),
    "mpnet": (
        ["mpnet.encoder.layer.0", "mpnet.encoder.layer.1"],
        [*(f"attention.attn.{part}" for part in "qkvo"), *BERT[4:]],
    ),
    "electra": (["electra.encoder.layer.0", "electra.encoder.layer.1"], BERT),
    "distilbert": (
        ["distilbert.transformer.layer.0", "distilbert.transformer.layer.1"],
        ["attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"],
    ),
    "albert": (
        ["albert.encoder.albert_layer_groups.0.albert_layers.0"],
        ["attention.query", "attention.key", "attention.value", "attention.dense", "ffn", "ffn_output"],
    ),
    "deberta-v2": (
        ["deberta.encoder.layer.0", "deberta.encoder.layer.1"],
        [*(f"{name}_proj" for name in SELF), *BERT[3:]],
    ),
    "modernbert": (["model.layers.0", "model.layers.1"], ["attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"]),
    "opt": (
        ["model.decoder.layers.0", "model.decoder.layers.1"],
        [*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "fc1", "fc2"],
    ),
    "gpt2": (["transformer.h.0", "transformer.h.1"], ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    "gpt_neox": (
        ["gpt_neox.layers.0", "gpt_neox.layers.1"],
        ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ),
    "phi3": (
        ["model.layers.0", "model.layers.1"],
        ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    ),
    **dict.fromkeys(LLAMAS, (["model.layers.0", "model.layers.1"], LLAMA)),
}
ROLES = {
    "modernbert": ["qkv", "o", "gate_up", "down"],
    "gpt2": ["qkv", "o", "up", "down"],
    "gpt_neox": ["qkv_by_head", "o", "up", "down"],
    "phi3": ["qkv", "o", "gate_up", "down"],
    **{family: ["q", "k", "v", "o", "gate", "up", "down"] for family in LLAMAS},
}
_ATTENTION = [f"{name}_attn.{part}_proj" for name in ("self", "encoder") for part in ("q", "k", "v", "out")]
_T5 = [f"layer.{i}.{name}Attention.{part}" for i, name in enumerate(["Self", "EncDec"]) for part in "qkvo"]
# of encoder and decoder
NAMES_OF_TWO = {
    "bart": [
        (["model.encoder.layers.0", "model.encoder.layers.1"], [*_ATTENTION[:4], "fc1", "fc2"]),
        (["model.decoder.layers.0", "model.decoder.layers.1"], [*_ATTENTION, "fc1", "fc2"]),
    ],
    "t5": [
        (
            ["transformer.encoder.block.0", "transformer.encoder.block.1"],
            [*_T5[:4], "layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"],
        ),
        (
            ["transformer.decoder.block.0", "transformer.decoder.block.1"],
            [*_T5, "layer.2.DenseReluDense.wi", "layer.2.DenseReluDense.wo"],
        ),
    ],
}


@pytest.mark.parametrize("family", NAMES)
def test_names(family):
    """Invariant 10: exactly these, in forward order."""
    names, inside = NAMES[family]
    sites = find_sites(make_net(family))
    assert [site.name for site in sites] == [f"{block}.{path}" for block in names for path in inside]
    roles = ROLES.get(family, ["q", "k", "v", "o", "up", "down"])
    assert [site.role for site in sites] == roles * len(names)
    assert {site.stack for site in sites} == {"decoder" if family in DECODERS else "encoder"}
    assert not any(site.cross for site in sites)


@pytest.mark.parametrize("family", NAMES_OF_TWO)
def test_names_of_two_stacks(family):
    """A decoder block has two attentions; the second one reads the encoder's states."""
    sites = find_sites(make_net(family))
    for stack, (names, inside) in zip(("encoder", "decoder"), NAMES_OF_TWO[family], strict=True):
        own = [site for site in sites if site.stack == stack]
        assert [site.name for site in own] == [f"{block}.{path}" for block in names for path in inside]
        second = ["q", "k", "v", "o"] if stack == "decoder" else []
        assert [site.role for site in own] == ["q", "k", "v", "o", *second, "up", "down"] * 2
        assert [site.cross for site in own] == [False, False, False, False, *[True] * len(second), False, False] * 2


@pytest.mark.parametrize("variant", ALL)
def test_sites_are_all_linears_of_the_blocks(variant):
    """Invariant 10: embeddings, projections, pooler and head are untouched."""
    family, settings = ALL[variant]
    net = make_net(family, **settings)
    inside = {site.name for site in find_sites(net)}
    assert all(isinstance(net.get_submodule(name), nn.Linear) for name in inside)
    # own projections of relative positions (old DeBERTa-v2), which the record leaves out on purpose
    assert [name for name in unplaced(net) if not name.endswith(("pos_key_proj", "pos_query_proj"))] == []
    outside = {name for name, m in net.named_modules() if isinstance(m, nn.Linear)} - inside
    allowed = ("pooler", "classifi", "head", "score", "project", "embedding_hidden_mapping_in", "pos_")
    assert all(any(word in name for word in allowed) for name in outside)


@pytest.mark.parametrize("family", TINY)
def test_roles_have_the_right_shapes(family):
    net = make_net(family)
    for site in find_sites(net):
        linear = net.get_submodule(site.name)
        wide, narrow = (64, 32), (16, 32) if family in ("llama", "mistral", "qwen2") else (32, 32)
        shape = {"gate": wide, "up": wide, "down": (32, 64), "k": narrow, "v": narrow}.get(site.role, (32, 32))
        fused = (64, 32) if family == "phi3" else (96, 32)
        shape = {"qkv": fused, "qkv_by_head": fused, "gate_up": (128, 32)}.get(site.role, shape)
        if family in ("qwen3", "gemma2", "gemma3_text"):  # heads of 16, not of 32 / 4
            shape = {"q": (64, 32), "o": (32, 64)}.get(site.role, shape)
        assert (linear.out_features, linear.in_features) == shape
        assert f".{site.layer}." in site.name


def test_blocks_of_groups_are_numbered_through():
    """ALBERT with 2 blocks in each of 3 groups."""
    found = [(layer, name) for _, layer, name, _ in blocks(make_net("albert", **VARIANTS["albert-groups"][1]))]
    path = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
    assert found == [(2 * group + inner, path.format(group, inner)) for group in range(3) for inner in range(2)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_rank_equals_dense(variant):
    """Invariant 1, beyond the families' usual shapes (those: test_surgery)."""
    family, settings = VARIANTS[variant]
    net = make_net(family, **settings).eval()
    inputs = {k: v for k, v in make_batch().items() if k in ("input_ids", "attention_mask")}
    before = net(**inputs).logits
    ranks = {site.name: min(net.get_submodule(site.name).weight.shape) for site in find_sites(net)}
    factorize(net, ranks, lambda _, w, r: decompose(w, r))
    torch.testing.assert_close(net(**inputs).logits, before, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_exports_load_elsewhere(variant, tmp_path):
    """Another process gets the same logits (the families' usual shapes: export/test_check)."""
    family, settings = VARIANTS[variant]
    net = make_net(family, **settings).eval()
    factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r))
    write_model(net, tmp_path)
    assert check_export(net, tmp_path) <= 1e-5


def test_base_model_alone_has_sites_too():
    net = make_net("bert").base_model
    assert find_sites(net)[0].name == "encoder.layer.0.attention.self.query"


@pytest.mark.parametrize("variant", ALL)
def test_sites_that_read_one_input(variant):
    """The groups read the very same tensor at every use, and no two groups of a block do."""
    net, read = make_net(ALL[variant][0], **ALL[variant][1]), {}
    for site in find_sites(net):
        module = net.get_submodule(site.name)
        module.register_forward_hook(lambda _, args, y, name=site.name: read.setdefault(name, []).append(args[0]))
    batch = make_batch()
    net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    groups = shared_inputs(net)
    fused = any("qkv" in site.role for site in find_sites(net))  # q, k and v are one site: every group has one
    assert any(len(group) > 1 for group in groups) != fused
    assert sorted(name for group in groups for name in group) == sorted(read)
    for group in groups:
        for name in group[1:]:
            assert [id(x) for x in read[name]] == [id(x) for x in read[group[0]]]
    sites = {site.name: site for site in find_sites(net)}
    leaders = [group[0] for group in groups if not sites[group[0]].cross]
    if not getattr(net.config, "position_buckets", None):
        assert len({tuple(map(id, read[name])) for name in leaders}) == len(leaders)
