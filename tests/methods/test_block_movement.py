"""Block movement pruning: scores of blocks and neurons, what is useless, heads that are filled, what is cut."""

import pytest
import torch
from helpers import evaluated as logits
from helpers import net_of
from tiny import make_batch, make_net

from lit_compress.export.fuse import fuse
from lit_compress.methods import BlockMovement
from lit_compress.methods.block_movement import BlockMovementSettings, BlockPruning, cut_empty
from lit_compress.models import accounting
from lit_compress.models.sites import find_sites, of_kind, sublayers
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import without_values
from lit_compress.numerics.masks import keep_count
from lit_compress.utils.errors import UserError

HEAD, NEURON = 4 * 8 * 32, 2 * 32  # weights of one in the tiny nets


def method_of(density=0.4, **settings):
    ramp = {"epochs": 2, "learning_rate": 1e-3, "start": 0.2, "block": 4, **settings}
    return BlockMovement(backbone="unused", density=density, prune=BlockMovementSettings(**ramp))


def masked_net(folder, family="bert", **settings):
    """A net with masked layers and its stage, as at the start of ``prune``; biases are not trivial."""
    net = net_of(family, torch.float32, dropout=0.0)
    folder.mkdir()
    save_net(net, folder)
    stage = BlockPruning(method_of(**settings).prune, settings.get("density", 0.4))
    masked = stage.begin(load_net(folder), None, None)  # type: ignore[arg-type]
    stage.attach(masked)
    stage.set_total_steps(10)
    return net, masked, stage


@pytest.mark.parametrize(
    "family", ["bert", "modernbert"]
)  # the second has q, k, v in one matrix, gate and up in another
def test_gradients_of_scores_are_the_loops(family, tmp_path):
    """dL/dS of a block is the sum of dL/dW' W over it; of a neuron, over its rows and its column."""
    dense, net, stage = masked_net(tmp_path / "dense", family)
    for model in (dense, net):
        model.train()
        model(**{key: value for key, value in make_batch().items() if key != "index"}).loss.backward()
    stage.before_step(net)
    for part in sublayers(dense):
        layers = {role: (dense.get_submodule(name), net.get_submodule(name)) for role, name in part.sites.items()}
        products = {role: (linear.weight.grad * linear.weight).detach() for role, (linear, _) in layers.items()}
        if part.kind == "attention":
            for role, (_, masked) in layers.items():
                rows, columns = (size // 4 for size in products[role].shape)
                for i in range(rows):
                    for j in range(columns):
                        expected = products[role][4 * i : 4 * i + 4, 4 * j : 4 * j + 4].sum()
                        assert torch.allclose(masked.score.grad[i * columns + j], expected, atol=1e-6)
            continue
        first = next(role for role in layers if role != "down")
        for n in range(64):
            rows = [products[first][row] for row in range(n, len(products[first]), 64)]
            expected = sum(row.sum() for row in rows) + products["down"][:, n].sum()
            assert all(torch.allclose(masked.score.grad[n], expected, atol=1e-6) for _, masked in layers.values())


def test_the_best_units_have_the_density(tmp_path):
    """One ranking, by weights; blocks of heads without values or readers give way; a whole number of heads."""
    *_, stage = masked_net(tmp_path / "dense")
    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(units.count, generator=generator) for units in stage.units]
    scores[2][: 2 * 8] -= 9  # the values of head 0 of layer 0
    scores[7].view(8, 8)[:, 2:4] -= 9  # the readers of head 1 of layer 1
    budget = keep_count(0.4, 16384)
    masks = stage.best(scores, budget)
    kept = [int(mask.sum()) * units.cost for mask, units in zip(masks, stage.units, strict=True)]
    assert budget - NEURON < sum(kept) <= budget
    for places, head in ((range(4), 0), (range(4, 8), 1)):
        for place, i in enumerate(places):
            grid = masks[i].view(8, 8)
            gone = grid[:, 2 * head : 2 * head + 2] if place == 3 else grid[2 * head : 2 * head + 2]
            assert not gone.any()
    blocks, neurons = sum(kept[:8]), sum(kept[8:])
    useless = stage._useless(torch.cat(masks[:8])).split([len(mask) for mask in masks[:8]])
    # naive: every block that is kept, of heads that are of use, is above every one that is not
    for kind, group in (("blocks", range(8)), ("neurons", (8, 9))):
        useful = [~gone for gone in useless] if kind == "blocks" else [masks[8] >= 0, masks[9] >= 0]
        on = torch.cat([scores[i][masks[i]] for i in group])
        off = torch.cat([scores[i][~masks[i] & use] for i, use in zip(group, useful, strict=True)])
        assert on.min() >= off.max()
    assert blocks % HEAD == 0 and budget - blocks - neurons < NEURON
    assert all(mask.all() for mask in stage.best(scores, 16384))


@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert", "deberta-v2", "modernbert", "opt", "bart"])
def test_what_is_empty_is_cut(family, tmp_path):
    """Masked = zeros = cut = exported, also without values in a head, any head, any neuron of a sub-layer."""
    _, net, stage = masked_net(tmp_path / "dense", family)
    parts = sublayers(net)
    attentions, ffns = of_kind(parts, "attention"), of_kind(parts, "ffn")

    def mask(part, role):
        layer = net.get_submodule(part.sites[role])
        return layer.grid(layer.mask)

    v = "qkv" if family == "modernbert" else "v"
    values = mask(attentions[-1], v)[-8:]
    values[:2] = False  # head 0 gives the bias of its values
    mask(attentions[-1], "o")[:, 4:6] = False  # nobody reads head 2
    mask(attentions[-1], "q" if v == "v" else "qkv")[6:8] = False  # head 3 lives on
    mask(attentions[0], "o")[:] = False  # all heads
    mask(ffns[0], "down")[:] = False
    for part, some in ((ffns[0], slice(None)), (ffns[-1], slice(0, 20))):
        for name in part.sites.values():
            net.get_submodule(name).mask[some] = False
    expected = logits(net)
    stage.deploy(net)
    cut_empty(net, accounting.dense_site_params(net))  # a budget for all that is not empty
    assert torch.allclose(logits(net), expected, atol=1e-5)
    assert torch.allclose(logits(fuse(net)), expected, atol=1e-5)
    assert net.get_submodule(attentions[-1].sites["o"]).in_features == 16
    assert net.get_submodule(ffns[-1].sites["down"]).in_features == 44
    assert accounting.density(net) <= accounting.stored_density(net) < 1
    left = {site.name for site in find_sites(net)}
    assert not left & set(ffns[0].sites.values())
    if family == "opt":  # its cache counts tokens by the first attention, which keeps a head
        assert net.get_submodule(attentions[0].sites["o"]).in_features == 8
    else:
        assert not left & set(attentions[0].sites.values())


def test_the_fullest_heads_are_filled(tmp_path):
    """With a budget the heads with the most weights stay, whole; the others go with their blocks."""
    _, net, stage = masked_net(tmp_path / "dense")
    generator = torch.Generator().manual_seed(2)
    masks = stage.best([torch.randn(units.count, generator=generator) for units in stage.units], keep_count(0.4, 16384))
    for units, mask in zip(stage.units, masks, strict=True):
        for layer in units.layers:
            layer.mask.copy_(mask)
    neurons = [int(mask.sum()) for mask in masks[8:]]
    stage.deploy(net)
    assert all(net.get_submodule(part.sites["o"]).in_features == 32 for part in of_kind(sublayers(net), "attention"))
    full = []
    for part in of_kind(sublayers(net), "attention"):
        weights = {role: net.get_submodule(name).weight for role, name in part.sites.items()}
        for head in range(4):
            rows = slice(8 * head, 8 * head + 8)
            found = [weights[role][rows] for role in "qkv"] + [weights["o"][:, rows]]
            full.append(sum(int(weight.ne(0).sum()) for weight in found))
    number = (keep_count(0.4, 16384) - sum(neurons) * NEURON) // HEAD
    cut_empty(net, keep_count(0.4, 16384))
    left = [net.get_submodule(part.sites["o"]).in_features // 8 for part in of_kind(sublayers(net), "attention")]
    assert sum(left) == number and accounting.stored_density(net) * 16384 == number * HEAD + sum(neurons) * NEURON
    limit = sorted(full)[-number]
    assert sum(count > limit for count in full[:4]) <= left[0] <= sum(count >= limit for count in full[:4])


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("bert", {"block": 6}, r"6 x 6 blocks do not divide the 32 x 32 weights of 'bert\..*query'; nearest valid 4"),
        ("bert", {"block": 0}, "prune.block: 0 is below 1"),
        ("bert", {"density": 0.06}, r"model.density: 0.06 is less than one head, 1024 of 16384 weights; .* 0.0625"),
        ("llama", {}, "sub-layers of 'llama' cannot be gated; those of bert, "),
        ("gpt_neox", {}, "alternate by head, which BlockMovement cannot cut"),
    ],
)
def test_what_cannot_work_is_one_line(family, settings, words):
    with pytest.raises(UserError, match=words):
        method_of(**settings).stages()[1].check(without_values(lambda: make_net(family)))


def test_unlike_stacks_are_one_line():
    with pytest.raises(UserError, match=r"model\.backbone: 2 and 4 heads in sub-layers of a model"):
        method_of().stages()[1].check(without_values(lambda: make_net("bart", encoder_attention_heads=2)))
