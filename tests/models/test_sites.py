"""Every Linear of the blocks is a site, nothing else is; without a record a pattern names the sites."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import logits
from in_memory import collect_kronecker
from tiny import ALL, SIZES, TINY, VARIANTS, make_batch, make_inputs, make_net
from torch import nn

from lit_compress.calibration.statistics import watched
from lit_compress.export.check import check_export
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.layers import MaskedLinear, MixedRankLinear
from lit_compress.models import accounting as budget
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import _OF_ENCODER, blocks, find_sites, set_pattern, shared_inputs, sublayers
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import factorize, replace
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def unplaced(net):
    """The names of the Linears inside the blocks that are no sites in the record of the family."""
    sites = {site.name for site in find_sites(net)}
    inside = [f"{name}.{path}" for *_, name, block in blocks(net) for path, module in block.named_modules()
              if isinstance(module, nn.Linear)]  # fmt: skip
    return [name for name in inside if name not in sites]


@pytest.mark.parametrize("variant", ALL)
def test_sites_are_all_linears_of_the_blocks(variant):
    """Invariant 10: embeddings, projections, pooler and head are untouched."""
    family, settings = ALL[variant]
    net = make_net(family, **settings)
    inside = {site.name for site in find_sites(net)}
    assert all(isinstance(net.get_submodule(name), nn.Linear) for name in inside)
    assert all(s.name.rpartition(".")[2].startswith(s.role) for s in find_sites(net) if s.role in ("q", "k", "v"))
    # own projections of relative positions (old DeBERTa-v2), which the record leaves out on purpose
    assert [name for name in unplaced(net) if not name.endswith(("pos_key_proj", "pos_query_proj"))] == []
    outside = {name for name, m in net.named_modules() if isinstance(m, nn.Linear)} - inside
    allowed = ("pooler", "classifi", "head", "score", "project", "embedding_hidden_mapping_in", "pos_")
    assert all(any(word in name for word in allowed) for name in outside)


def test_blocks_of_groups_are_numbered_through():
    """ALBERT with 2 blocks in each of 3 groups."""
    found = [(layer, name) for _, layer, name, _ in blocks(make_net("albert", **VARIANTS["albert-groups"][1]))]
    path = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
    assert found == [(2 * group + inner, path.format(group, inner)) for group in range(3) for inner in range(2)]


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
    net(**make_inputs())
    groups = shared_inputs(net)
    fused = any("qkv" in site.role for site in find_sites(net))  # q, k and v are one site: every group has one
    assert any(len(group) > 1 for group in groups) != fused
    assert sorted(name for group in groups for name in group) == sorted(read)
    assert [site.name for site in find_sites(net)] == list(read)  # in forward order
    for group in groups:
        for name in group[1:]:
            assert [id(x) for x in read[name]] == [id(x) for x in read[group[0]]]
    sites = {site.name: site for site in find_sites(net)}
    leaders = [group[0] for group in groups if not sites[group[0]].cross]
    if not getattr(net.config, "position_buckets", None):
        assert len({tuple(map(id, read[name])) for name in leaders}) == len(leaders)


PEGASUS = {"encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1, "decoder_start_token_id": 1}


@pytest.fixture(scope="module")
def unknown():
    return make_net("megatron-bert", **SIZES).eval()


def named(net, pattern="encoder.*.(intermediate|output).dense"):
    """A copy of ``net`` with a pattern."""
    net = copy.deepcopy(net)
    set_pattern(net.config, pattern)
    return net


def test_the_pattern_finds_linears_of_the_base_model(unknown):
    """In order; pooler and head never."""
    net = named(unknown)
    ends = ["attention.output.dense", "intermediate.dense", "output.dense"]
    expected = [(f"bert.encoder.layer.{i}.{end}", end, i, "encoder") for i in (0, 1) for end in ends]
    assert [(site.name, site.role, site.layer, site.stack) for site in find_sites(net)] == expected
    assert len(find_sites(named(unknown, "attention.self.(query|key)"))) == 4
    everything = {site.name for site in find_sites(named(unknown, ".*"))}
    assert len(everything) == 12 and not {"bert.pooler.dense", "classifier"} & everything
    assert shared_inputs(net) == [(site.name,) for site in find_sites(net)] and unplaced(net) == []
    params = budget.count_params(net)
    assert params.total - params.non_embedding == net.get_input_embeddings().weight.numel()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [MixedRankLinear, MaskedLinear])
def test_training_form_is_fused_is_exported_is_reloaded(unknown, layer, tmp_path):
    """At full rank the dense net; below, the file has what is counted."""
    net = named(unknown)
    full = {site.name: min(net.get_submodule(site.name).weight.shape) for site in find_sites(net)}
    whole = factorize(copy.deepcopy(net), full, lambda _, w, r: decompose(w, r))
    torch.testing.assert_close(logits(whole), logits(unknown), atol=1e-5, rtol=0)
    if layer is MaskedLinear:  # rows
        for site in find_sites(net):
            masked = MaskedLinear(net.get_submodule(site.name))
            masked.mask[::2] = False
            replace(net, site.name, masked.zeroed())
    else:
        factorize(net, RankRule(0.5).allocate(net), lambda _, w, r: decompose(w, r), layer)
    assert [site.name for site in find_sites(net)] == [site.name for site in find_sites(named(unknown))]
    fused = fuse(net)
    torch.testing.assert_close(logits(fused), logits(net), atol=1e-5, rtol=0)
    write_model(fused, tmp_path)
    assert check_export(fused, tmp_path) <= 1e-5
    again = load_net(tmp_path)
    assert torch.equal(logits(again), logits(fused))
    assert budget.stored_density(again) == budget.stored_density(fused) <= 0.5
    assert budget.dense_site_params(again) == 2 * (32 * 32 + 2 * 32 * 64)


def test_statistics_of_an_encoder_decoder():
    """Keys and values of the attention over the encoder's states are counted by the encoder's tokens."""
    net = named(make_net("pegasus", "xsum", dropout=0.0, **TINY["bart"] | PEGASUS), ".*(attn.*|fc.)").eval()
    cross = [site for site in find_sites(net) if site.cross]
    assert [site.name.rpartition(".")[2] for site in cross] == ["k_proj", "v_proj"]
    batch = make_batch(size=2)
    batch["labels"] = batch["input_ids"][:, :4].clone()
    found = collect_kronecker(net, [batch], "summarization")
    assert set(found) == {site.name for site in find_sites(net)} and len(found) == 16


def test_matrices_that_read_no_tokens_of_the_texts_are_one_line():
    """A model may pad its inputs by itself, or read the states of its encoder under a name of its own."""
    fc, sums = nn.ModuleDict({"fc": nn.Linear(4, 2)}), SimpleNamespace(by_token=True, use=lambda *_: None)
    with watched(fc, sums, {}, [torch.ones(2, 5)], 2, ["fc"]):
        fc["fc"](torch.ones(2, 5, 4))
        with pytest.raises(UserError, match=r"calibration: 'fc' reads \(2, 7, 4\), not the tokens of 2 texts; leave"):
            fc["fc"](torch.ones(2, 7, 4))
    names = ["decoder.block.0.layer.1.EncDecAttention.k", "decoder.layers.0.encoder_attn.v_proj"]
    assert all(map(_OF_ENCODER.search, names)) and not _OF_ENCODER.search("decoder.block.0.layer.0.SelfAttention.k")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("fc9", "no Linear of megatron-bert is called 'fc9'; valid: bert.encoder.layer.0.attention.self.query, "),
     ("(fc", r"'\(fc' is no regular expression \(.*\); e.g. ")],
)  # fmt: skip
def test_a_wrong_pattern_is_one_line(unknown, pattern, says):
    with pytest.raises(UserError, match=f"model.sites: {says}"):
        find_sites(named(unknown, pattern))


def test_what_needs_a_record_is_one_line(unknown):
    with pytest.raises(UserError, match="sub-layers of 'megatron-bert' cannot be gated; those of bert, "):
        sublayers(named(unknown))
    with pytest.raises(UserError, match="hidden states of 'megatron-bert' cannot be projected; nearest: bert, "):
        residual_stream(named(unknown))
    with pytest.raises(UserError, match="'fc1', but bert has a record of its sites; leave it out"):
        named(make_net("bert"), "fc1")
    with pytest.raises(
        UserError,
        match=r"'megatron-bert' is not supported; .*add_an_architecture.*--model.sites '\(dense\|key\|query\|value\)'",
    ):
        find_sites(unknown)
