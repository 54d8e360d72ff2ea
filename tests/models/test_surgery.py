"""Swap, describe, save, rebuild; nothing half-written."""

import copy

import pytest
import torch
from helpers import logits
from moments import decompose
from tiny import ALL, TINY, make_net
from torch import nn

from lit_compress.layers import LowRankLinear, LowRankSparseLinear
from lit_compress.layers.training.mixed_rank import MixedRankLinear
from lit_compress.models import storage, surgery
from lit_compress.models.backbones import empty_net
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import factorize, replace, without_values
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def compress(net, density=0.5, layer=LowRankLinear):
    return surgery.factorize(net, RankRule(density).allocate(net), lambda _, w, r: decompose(w, r), layer).eval()


@pytest.mark.parametrize("variant", ALL)
def test_full_rank_equals_dense(variant):
    """Invariant 1: whole-model logits are equal at full rank."""
    net = make_net(ALL[variant][0], **ALL[variant][1]).eval()
    before = logits(net)
    ranks = {name: min(net.get_submodule(name).weight.shape) for name in RankRule(0.5).allocate(net)}
    surgery.factorize(net, ranks, lambda _, w, r: decompose(w, r))
    assert torch.allclose(logits(net), before, atol=1e-5)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("layer", [LowRankLinear, MixedRankLinear])
def test_round_trip(family, layer, tmp_path):
    """Invariant 11: save -> rebuild shapes -> load strictly -> identical logits."""
    net = compress(make_net(family), layer=layer)
    storage.save_net(net, tmp_path)
    again = storage.load_net(tmp_path)
    assert surgery.describe(again) == surgery.describe(net) != {}
    assert not any(isinstance(m, MixedRankLinear) for m in again.modules())
    assert torch.equal(logits(again), logits(net))


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "structure.json"])
def test_broken_folder_is_one_line(damage, tmp_path):
    storage.save_net(compress(make_net()), tmp_path)
    (tmp_path / damage).write_bytes(b"\x00broken")
    with pytest.raises(UserError, match="cannot load a model from") as error:
        storage.load_net(tmp_path)
    assert "\n" not in str(error.value)


SITE = "transformer.h.0.mlp.c_fc"


def test_a_net_is_an_ordinary_one_in_its_file(tmp_path):
    """transformers' own class reads what was saved, also where a Linear took the place of another layer."""
    from transformers import GPT2ForSequenceClassification
    from transformers.pytorch_utils import Conv1D

    net = make_net("gpt2", dropout=0.0).eval()
    whole = factorize(copy.deepcopy(net), {SITE: 0}, None, LowRankSparseLinear)
    whole.get_submodule(SITE).sparse.data.copy_(net.get_submodule(SITE).weight)
    replace(whole, SITE, whole.get_submodule(SITE).fuse())
    assert isinstance(whole.get_submodule(SITE), nn.Linear)
    for some in (net, whole):
        save_net(some, tmp_path)
        stock = GPT2ForSequenceClassification.from_pretrained(tmp_path).eval()
        assert isinstance(stock.get_submodule(SITE), Conv1D)
        torch.testing.assert_close(logits(stock), logits(net), atol=1e-6, rtol=0)
        again = load_net(tmp_path)
        assert all(isinstance(again.get_submodule(site.name), nn.Linear) for site in find_sites(again))
        assert torch.equal(logits(again), logits(net))


def test_a_state_has_the_form_of_the_file():
    """And is read back into the net, and into one of transformers."""
    net, other = make_net("gpt2", seed=1), make_net("gpt2", seed=2)
    assert net.get_submodule(SITE).weight.shape == (64, 32)
    state = net.state_dict()
    assert state[f"{SITE}.weight"].shape == (32, 64)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_the_random_numbers_stay():
    config = make_net("bert").config
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    without_values(lambda: empty_net(config))
    assert torch.equal(torch.rand(3), first)
