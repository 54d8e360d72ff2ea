"""Swap, describe, save, rebuild; nothing half-written."""

import json

import pytest
import torch
from tiny import TINY, make_batch, make_net

from lit_compress.layers import LowRankLinear, MixedRankLinear
from lit_compress.models import storage, surgery
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils import files
from lit_compress.utils.errors import UserError


def inputs():
    return {k: v for k, v in make_batch().items() if k in ("input_ids", "attention_mask")}


def compress(net, density=0.5, layer=LowRankLinear):
    return surgery.factorize(net, RankRule(density).allocate(net), lambda _, w, r: decompose(w, r), layer).eval()


@pytest.mark.parametrize("family", TINY)
def test_full_rank_equals_dense(family):
    """Invariant 1: whole-model logits are equal at full rank."""
    net = make_net(family).eval()
    before = net(**inputs()).logits
    ranks = {name: min(net.get_submodule(name).weight.shape) for name in RankRule(0.5).allocate(net)}
    surgery.factorize(net, ranks, lambda _, w, r: decompose(w, r))
    assert torch.allclose(net(**inputs()).logits, before, atol=1e-6)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("layer", [LowRankLinear, MixedRankLinear])
def test_round_trip(family, layer, tmp_path):
    """Invariant 11: save -> rebuild shapes -> load strictly -> identical logits."""
    net = compress(make_net(family), layer=layer)
    storage.save_net(net, tmp_path)
    again = storage.load_net(tmp_path)
    assert surgery.describe(again) == surgery.describe(net) != {}
    assert not any(isinstance(m, MixedRankLinear) for m in again.modules())
    assert torch.equal(again(**inputs()).logits, net(**inputs()).logits)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_factors_are_multiplied_out(family):
    """The net has no factors, the classes it had, and the same outputs; stacks and tables of tokens, too."""
    net = make_net(family).eval()
    plain = {name: type(module) for name, module in net.named_modules()}
    stacks = RankRule(0.5, stacked=True).stacks(net)
    ranks = RankRule(0.5, stacked=True).allocate(net)
    surgery.factorize(net, ranks, lambda _, w, r: decompose(w, r), stacks=stacks)
    before = net(**inputs()).logits
    assert surgery.describe(net)
    surgery.multiply_out(net)
    assert surgery.describe(net) == {} and {n: type(m) for n, m in net.named_modules()} == plain
    assert torch.allclose(net(**inputs()).logits, before, atol=1e-5)


def test_factor_names_in_the_file(tmp_path):
    from safetensors.torch import load_file

    storage.save_net(compress(make_net()), tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    site = "bert.encoder.layer.0.attention.self.query"
    assert {f"{site}.left", f"{site}.right", f"{site}.bias"} <= names.keys()
    assert f"{site}.weight" not in names


def test_structure_alone_gives_the_shapes():
    net = compress(make_net())
    empty = surgery.rebuild(make_net(), json.loads(json.dumps(surgery.describe(net))))
    assert {k: v.shape for k, v in empty.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "structure.json"])
def test_broken_folder_is_one_line(damage, tmp_path):
    storage.save_net(compress(make_net()), tmp_path)
    (tmp_path / damage).write_bytes(b"\x00broken")
    with pytest.raises(UserError, match="cannot load a model from") as error:
        storage.load_net(tmp_path)
    assert "\n" not in str(error.value)


def test_interrupted_write_leaves_what_was_there(tmp_path):
    folder = tmp_path / "out"
    with files.atomic_folder(folder) as temporary:
        (temporary / "a").write_text("first")
    with pytest.raises(RuntimeError), files.atomic_folder(folder) as temporary:
        (temporary / "a").write_text("second")
        raise RuntimeError
    assert (folder / "a").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with files.atomic_folder(folder) as temporary:
        (temporary / "b").write_text("third")
    assert [p.name for p in folder.iterdir()] == ["b"]


def test_odd_widths_are_counted():
    net = make_net("bert")
    names = list(RankRule(0.5).allocate(net))[:3]
    surgery.factorize(net, dict(zip(names, (8, 3, 16), strict=True)), lambda _, w, r: decompose(w, r))
    assert surgery.odd_widths(net) == 1
