"""LLM-Pruner: groups that go together in every family, their importance by a naive loop, counts, mistakes."""

import copy

import pytest
import torch
from helpers import logits, net_of
from in_memory import mean_gradients
from tiny import ALL, make_batch, make_net

from lit_compress.methods import LLMPruner
from lit_compress.methods.llm_pruner import CoupledPruning, group_importance, kept_counts, pruned_parts
from lit_compress.models.accounting import count_params, stored_density
from lit_compress.models.cut import cut_units
from lit_compress.utils.errors import UserError


def stage_of(density=0.5, round_to=None, **settings):
    return LLMPruner(backbone="x", density=density, round_to=round_to, prune=CoupledPruning(**settings)).stages()[-1]


def gradients_of(net, parts):
    names = [name for part in parts for name in part.sites.values()]
    return mean_gradients(net, [make_batch(6, 9)], "classification", names)


def test_importance_is_what_the_paper_says():
    """Llama, whose two heads of keys have two heads of queries each: one element after the other."""
    net = net_of("llama")
    attention, network = pruned_parts(net, CoupledPruning())[:2]
    gradients = gradients_of(net, [attention, network])
    rows = {"q": lambda u: range(16 * u, 16 * u + 16), "k": lambda u: range(8 * u, 8 * u + 8),
            "gate": lambda u: [u], "up": lambda u: [u]}  # fmt: skip
    rows |= {"v": rows["k"], "o": rows["q"], "down": rows["up"]}
    for part, units in ((attention, (0, 1)), (network, (0, 31, 63))):
        found = group_importance(net, part, gradients)
        assert len(found) == part.count(net) == (2 if part is attention else 64)
        for unit in units:
            scores = []
            for role, name in part.sites.items():
                w, g = (net.get_parameter(f"{name}.weight"), gradients[name])
                w, g = (m.detach().T if role in ("o", "down") else m.detach() for m in (w, g))
                scores.append(sum(abs(float(w[i, j] * g[i, j])) for i in rows[role](unit) for j in range(w.shape[1])))
            assert float(found[unit]) == pytest.approx(sum(scores), rel=1e-6)


def test_heads_whose_queries_keys_and_values_alternate_are_scored_by_themselves():
    """GPT-NeoX: the rows of a head stand together, its query's, then its key's, then its value's."""
    net = net_of("gpt_neox")
    part = pruned_parts(net, CoupledPruning())[0]
    gradients, name = gradients_of(net, [part]), part.sites["qkv_by_head"]
    found = group_importance(net, part, gradients)
    product = (net.get_parameter(f"{name}.weight").detach() * gradients[name]).double()
    reader = (net.get_parameter(f"{part.last}.weight").detach() * gradients[part.last]).double()
    rows, width = len(product) // part.heads, reader.shape[1] // part.heads
    for head in range(part.heads):
        expected = product[head * rows : (head + 1) * rows].abs().sum()
        expected += reader[:, head * width : (head + 1) * width].abs().sum()
        assert float(found[head]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert", "deberta-v2-own-positions", "modernbert-biases", "opt",
                                    "llama", "gpt_neox", "qwen3-sliding", "gemma2", "bart-uneven",
                                    "t5-gated"])  # fmt: skip
def test_what_goes_is_coupled(family):
    """The cut net is the one in which nothing reads the removed heads and neurons; outline and budget agree with it."""
    kind, own = ALL[family]
    net, settings = net_of(kind, torch.float32, **own), CoupledPruning()
    counts, generator = kept_counts(net, settings, 0.85), torch.Generator().manual_seed(0)
    parts, masks = pruned_parts(net, settings), {}
    outlined = stage_of(0.85).outline(copy.deepcopy(net).to("meta"))
    with torch.no_grad():
        reference = copy.deepcopy(net)
        for part in parts:
            units, kept = part.count(net), counts[part.last]
            assert 0 < kept <= units
            masks[part.last] = torch.randperm(units, generator=generator) < kept
            weight = reference.get_parameter(f"{part.last}.weight")
            weight *= masks[part.last].repeat_interleave(weight.shape[1] // units)
    cut_units(net, masks)
    assert torch.allclose(logits(net), logits(reference), atol=1e-5)
    assert 0.84 < stored_density(net) <= 0.85 and count_params(outlined).sites == count_params(net).sites
    assert {part.kind for part in parts} == ({"ffn"} if kind == "albert" else {"attention", "ffn"})


def test_every_block_keeps_the_same_share_and_some_stay_whole():
    net = make_net("bert", num_hidden_layers=4)
    counts = list(kept_counts(net, CoupledPruning(), 0.4).values())
    assert counts[::2] == [2] * 4 and set(counts[1::2]) <= {19, 20}  # 1.6 heads; neurons make up for it
    counts = kept_counts(net, CoupledPruning(keep_first=1, keep_last=2), 0.85)
    assert {name.split(".")[3] for name in counts} == {"1"} and list(counts.values()) == [2, 19]
    assert {count % 8 for count in list(kept_counts(net, CoupledPruning(), 0.4, 8).values())[1::2]} == {0}


def test_uniform_blocks_keep_exactly_as_many():
    net = make_net("bert", num_hidden_layers=4)
    stage = LLMPruner(backbone="x", density=0.55, shape="uniform").stages()[-1]
    counts = stage.compression.counts(net)
    assert set(counts) == {f"bert.encoder.layer.{i}.output.dense" for i in range(4)}  # BERT's heads stay
    assert len(set(counts.values())) == 1
    stage.outline(net)
    assert 0.54 < stored_density(net) <= 0.55
    whole = CoupledPruning(keep_first=1)
    with pytest.raises(UserError, match=r"model\.shape: 'uniform' .* prune\.keep_first 1, .* nearest: 0, 0"):
        LLMPruner(backbone="x", density=0.55, shape="uniform", prune=whole).stages()[-1].check(make_net("bert"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"keep_first": 1, "keep_last": 1},
            r"prune\.keep_first 1, prune\.keep_last 1: they leave none of the 2 blocks",
        ),
        ({"density": 0.01}, r"model\.density: 0\.01 cannot be reached by LLMPruner, .* the smallest is 0\.13\d+"),
        ({"density": 0.4, "keep_first": 1}, r"model\.density: 0\.4 cannot be .* 8,192 weights of what stays whole"),
    ],
)
def test_what_cannot_be_pruned(settings, message):
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        stage_of(**settings).check(make_net("bert"))


def test_settings_that_cannot_be():
    with pytest.raises(UserError, match=r"^prune\.keep_first: -1 is below 0"):
        CoupledPruning(keep_first=-1)


def test_vectors_have_no_loss_of_single_texts():
    with pytest.raises(UserError, match=r"'stsb_embedding' gives vectors, .* nearest: SecondOrder"):
        LLMPruner(task="stsb_embedding")
