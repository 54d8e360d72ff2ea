"""Second moments of hidden states: against stacked tokens, whatever the batches; the projections made of them."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, IN_FLOAT32, gates_of, logits, net_of
from tiny import make_batch

from lit_compress.calibration.second_moments import bases_of, collect_grams, draw_tokens
from lit_compress.models.projected.projections import insert_projections
from lit_compress.models.residual_stream import has_head_projections, residual_stream
from lit_compress.utils.errors import UserError


def batches(sizes=(4, 4, 4), pad=0, junk=False):
    """Twelve examples in batches of ``sizes``, with ``pad`` more positions of padding."""
    whole = make_batch(12, 11)
    whole["attention_mask"][5, 3:] = 0
    found = []
    for part in zip(*(whole[n].split(list(sizes)) for n in ("input_ids", "attention_mask", "index")), strict=True):
        batch = dict(zip(("input_ids", "attention_mask", "index"), part, strict=True))
        for name, value in (("input_ids", 7), ("attention_mask", 0)):
            batch[name] = torch.nn.functional.pad(batch[name], (0, pad), value=value)
        found.append(batch)
    if junk:
        copy = {n: v[:2].clone() for n, v in found[0].items()}
        found.append({**copy, "index": torch.tensor([-1, -1])})
    return found


def test_the_draw():
    lengths = torch.tensor([3, 0, 7, 5])
    flags = draw_tokens(lengths, 6, 0)
    assert [len(f) for f in flags] == lengths.tolist() and sum(int(f.sum()) for f in flags) == 6
    assert sum(int(f.sum()) for f in draw_tokens(lengths, 100, 0)) == 15
    assert any(not torch.equal(a, b) for a, b in zip(flags, draw_tokens(lengths, 6, 1), strict=True))


def both(batch):
    """The masks of texts that a decoder reads as well."""
    return [batch["attention_mask"]] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_grams_by_hand(family):
    """All real tokens of every site and head, stacked; of both norms of the last site, of all uses of a block."""
    net, inputs = net_of(family), {}
    stream = residual_stream(net)
    attentions = stream.attentions if has_head_projections(net) else []
    whole = batches((12,))[0]
    real = whole["attention_mask"].bool().flatten()

    def note(name, x):
        inputs.setdefault(name, []).append(x.flatten(0, -2)[real])

    norms = [name for place in stream.rotatable for name in place.norms]
    handles = [net.get_submodule(n).register_forward_pre_hook(lambda _, a, n=n: note(n, a[0])) for n in norms]
    handles += [net.get_submodule(b.sites[r]).register_forward_hook(lambda _, a, y, n=b.sites[r]: note(n, y))
                for b in attentions for r in "qkv"]  # fmt: skip
    logits_before = net(**{n: whole[n] for n in ("input_ids", "attention_mask")}).logits
    for handle in handles:
        handle.remove()
    net.train()
    grams = collect_grams(net, batches(), 10**6, masks=both)
    assert net.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.equal(net.eval()(**{n: whole[n] for n in ("input_ids", "attention_mask")}).logits, logits_before)
    assert len(grams.sites) == len(stream.rotatable)
    for i, place in enumerate(stream.rotatable):
        x = torch.cat([use for name in place.norms for use in inputs[name]])
        assert torch.allclose(grams.sites[i], x.T @ x, rtol=1e-9, atol=1e-9)
    assert len(grams.heads) == len(attentions)
    for i, block in enumerate(attentions):
        for kind, role in enumerate("qkv"):
            uses = inputs[block.sites[role]]
            assert len(uses) == (3 if family == "albert" else 1)
            for head, x in enumerate(torch.cat(uses).split(8, 1)):
                assert torch.allclose(grams.heads[i, kind, head], x.T @ x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_grams_in_float32(family):
    """To the rounding of float32 they are what they are in float64."""
    net = net_of(family)
    exact = collect_grams(net, batches(), 10**6, masks=both)
    grams = collect_grams(net.float(), batches(), 10**6, masks=both)
    for found, wanted in ((grams.sites, exact.sites), (grams.heads, exact.heads)):
        assert found.dtype == torch.float64 and (found - wanted).norm() <= 1e-6 * wanted.norm()


def test_tokens_of_two_stacks():
    """A decoder's tokens are drawn among its own; a cross-attention's keys are of the encoder's."""
    net = net_of("bart")
    stream, whole = residual_stream(net), batches((12,))
    read, wrote = whole[0]["attention_mask"], torch.zeros(12, 11).long()
    wrote[:, :4] = 1
    grams = collect_grams(net, whole, 10**6, masks=lambda batch: [read, wrote])
    found = {}
    names = {"first": stream.sites[0].norms[0], "last": stream.sites[-1].norms[0]}
    names |= {f"cross_{role}": stream.sublayers[5].sites[role] for role in "qk"}
    assert stream.sublayers[5].type == "cross"
    for key, name in names.items():
        module = net.get_submodule(name)
        module.register_forward_hook(lambda _, args, y, key=key: found.update({key: (args[0], y)}))
    net(**{n: whole[0][n] for n in ("input_ids", "attention_mask")})
    for key, site, mask in (("first", 0, read), ("last", -1, wrote)):
        x = found[key][0][mask.bool()]
        assert torch.allclose(grams.sites[site], x.T @ x, rtol=1e-9, atol=1e-9)
    for kind, mask in ((0, wrote), (1, read)):
        x = found["cross_" + "qk"[kind]][1][mask.bool()][:, :8]
        assert torch.allclose(grams.heads[3, kind, 0], x.T @ x, rtol=1e-9, atol=1e-9)


def test_batches_and_padding_do_not_matter():
    net = net_of("bert")
    expected = collect_grams(net, batches(), 40, seed=3)
    for other in (batches((1,) * 12), batches((7, 5)), batches(pad=6), batches(junk=True), batches()[::-1]):
        found = collect_grams(net, other, 40, seed=3)
        assert torch.allclose(found.sites, expected.sites, rtol=1e-10, atol=1e-10)
        assert torch.allclose(found.heads, expected.heads, rtol=1e-10, atol=1e-10)
    again = collect_grams(net, batches(), 40, seed=3)
    assert torch.equal(again.sites, expected.sites)
    assert not torch.allclose(collect_grams(net, batches(), 40, seed=4).sites, expected.sites)
    # the same slots behind the padding: with the same batches, bit for bit nothing of it
    longer = batches()
    for batch in longer:
        batch["input_ids"] = torch.where(batch["attention_mask"] == 0, 9, batch["input_ids"])
    assert torch.equal(collect_grams(net, longer, 40, seed=3).sites, expected.sites)


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated_projections_change_nothing(family):
    net = net_of(family)
    expected = logits(net)
    bases = bases_of(collect_grams(net, batches(), 60, masks=both), centred=family not in IN_FLOAT32)
    insert_projections(net, bases, gates_of(family))
    assert torch.allclose(logits(net), expected, atol=1e-5 if family in IN_FLOAT32 else 1e-8)
    assert torch.allclose(logits(net.float()), expected.float(), atol=1e-5)


def test_dead_heads_change_nothing():
    """A head of zeros has no direction of its own, and no singular inverse."""
    net = net_of("bert")
    with torch.no_grad():
        for name in ("query", "key", "value"):
            layer = getattr(net.bert.encoder.layer[0].attention.self, name)
            layer.weight[:8], layer.bias[:8] = 0, 0
            layer.weight[8:12], layer.bias[8:12] = 0, 0  # and a half of one
    expected = logits(net)
    bases = bases_of(collect_grams(net, batches(), 60))
    insert_projections(net, bases, gates_of("bert"))
    assert torch.allclose(logits(net), expected, atol=1e-8)
    assert torch.allclose(logits(net.float()), expected.float(), atol=1e-5)


def test_the_axes_of_the_authors_keep_the_mean():
    net = net_of("bert")
    grams = collect_grams(net, batches(), 60)
    axes = bases_of(grams, centred=False).sites[0]
    energy = (axes.T @ grams.sites[0] @ axes).diagonal()
    assert torch.allclose(energy, torch.linalg.eigvalsh(grams.sites[0]).flip(0), atol=1e-8)


def test_what_cannot_be_calibrated():
    net = net_of("bert")
    with pytest.raises(UserError, match=r"prune.tokens: 31 tokens are fewer than the 32 dimensions; give at lea"):
        collect_grams(net, batches(), 31)
    with pytest.raises(UserError, match="4 tokens are fewer than the 32 dimensions; the examples have no more"):
        collect_grams(net, [{n: v[1:2] for n, v in make_batch().items()}], 4096)
    with torch.no_grad():
        net.bert.embeddings.LayerNorm.bias[0] = torch.nan
    with pytest.raises(UserError, match="inf or NaN"):
        bases_of(collect_grams(net, batches(), 60))
