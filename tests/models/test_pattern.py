"""Nets whose architecture has no record: a pattern names the sites, and travels with the net."""

import copy

import pytest
import torch
from helpers import logits
from in_memory import collect_kronecker
from tiny import TINY, make_batch, make_net
from unplaced import unplaced

from lit_compress.export.check import check_export
from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import write_model
from lit_compress.layers import MaskedLinear, MixedRankLinear
from lit_compress.models import accounting as budget
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import find_sites, set_pattern, shared_inputs, sublayers
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import factorize, replace
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PEGASUS = {"encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1, "decoder_start_token_id": 1}


@pytest.fixture(scope="module")
def unknown():
    return make_net("megatron-bert", **BERT).eval()


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
