"""BERT-of-Theseus: modules and successors by a naive loop, the schedule, a short run, what is refused."""

import copy
import json

import pytest
import torch
from helpers import logits
from tiny import make_batch, make_net

from lit_compress.methods import Theseus
from lit_compress.methods.base import Distillation
from lit_compress.methods.theseus import BlockReplacing, ReplacedBlock, Replacing
from lit_compress.models.shorten import blocks_left
from lit_compress.models.sites import blocks
from lit_compress.models.storage import load_net, save_net
from lit_compress.utils.errors import UserError

FAMILIES = ("bert", "distilbert", "mpnet", "deberta-v2", "opt", "llama", "gpt2", "gpt_neox", "phi3", "bart")
MORE = {"bert": {"num_hidden_layers": 6}, "distilbert": {"n_layers": 4}}


def stage_for(density=0.5, within=False, **settings):
    given = {"epochs": 2, "learning_rate": 1e-3, "warmup": 0.0} | settings
    return BlockReplacing(Replacing(**given), density, Distillation(alpha=0.0), within)


def naive(net, dense, coins):
    """The blocks that a forward goes through, one after the other, as an ordinary net of that many blocks."""
    lists, small = {}, copy.deepcopy(dense)
    small.config.use_cache = False  # its blocks have numbers from two nets
    for _, _, name, block in blocks(net):
        lists.setdefault(name.rpartition(".")[0], []).append(block)
    for path, successors in lists.items():
        chosen, whole = [], small.get_submodule(path)
        width = len(whole) // len(successors)
        for i, successor in enumerate(successors):
            if coins.pop(0):
                plain = copy.deepcopy(successor)
                plain.release()
                chosen.append(plain)
            else:
                chosen += whole[i * width : (i + 1) * width]
        parent, _, name = path.rpartition(".")
        setattr(small.get_submodule(parent), name, torch.nn.ModuleList(chosen))
    return small.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_goes_through_successors_or_predecessors(family, tmp_path):
    """By the coins, in training only; what is deployed is an ordinary net of fewer blocks."""
    dense = make_net(family, dropout=0.0, **MORE.get(family, {}))
    save_net(dense, tmp_path)
    stage = stage_for(1 / 3 if family == "bert" else 0.5)
    net = stage.begin(load_net(tmp_path), None, None)
    stage.attach(net)
    number = len(stage._blocks)
    assert number == len(list(blocks(net))) == {"bert": 2, "distilbert": 2, "bart": 2}.get(family, 1)
    with torch.no_grad():  # successors that differ from what they were copied from
        for block in stage._blocks:
            for parameter in block.own_parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    for first in (True, False):
        for second in (True, False)[:number]:
            coins = [first, second][:number]
            for block, coin in zip(stage._blocks, coins, strict=True):
                block.replaces = coin
            assert torch.allclose(logits(net.train()), logits(naive(net, dense, list(coins))), atol=1e-5)
    successors = naive(net, dense, [True] * number).eval()
    expected = logits(net.eval())  # whatever the coins
    assert torch.allclose(expected, logits(successors), atol=1e-5)
    stage.deploy(net)
    folder = tmp_path / "small"
    folder.mkdir()
    save_net(net, folder)
    small = load_net(folder)
    assert json.loads((folder / "structure.json").read_text()) == {}
    assert torch.equal(logits(small), expected) and len(list(blocks(small))) == number
    assert not any(isinstance(module, ReplacedBlock) for module in net.modules())


def test_only_successors_learn_and_all_of_them_have_gradients(tmp_path):
    save_net(make_net(dropout=0.0, num_hidden_layers=4), tmp_path)
    stage = stage_for()
    net = stage.begin(load_net(tmp_path), None, None)
    stage.attach(net)
    stage._blocks[0].replaces, stage._blocks[1].replaces = False, True
    batch = make_batch()
    net.train()(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
    own = [[p.grad for p in block.own_parameters()] for block in stage._blocks]
    assert not any(torch.count_nonzero(grad) for grad in own[0]) and any(torch.count_nonzero(grad) for grad in own[1])
    learning = {id(p) for block in stage._blocks for p in block.own_parameters()}
    assert all((p.grad is not None) == (id(p) in learning) == p.requires_grad for p in net.parameters())


@pytest.mark.parametrize(("start", "rise", "steps"), [(0.3, 0.5, 20), (0.0, 7, 20), (0.5, 0, 5), (1.0, 0.4, 10)])
def test_the_probability_rises_linearly(start, rise, steps):
    """p_t = min(1, k t + b)."""
    stage = stage_for(start=start, rise=rise)
    stage.set_total_steps(steps)
    last = round(rise * steps) if rise < 1 else rise
    for t in range(steps):
        expected = min(1.0, (1 - start) / last * t + start) if last else 1.0
        assert stage.p(t) == pytest.approx(expected)


def test_a_short_run(fit, dense):
    """Coins follow p and are those of the batch's seed; embeddings and head stay; successors move."""
    seen = []

    def look(trainer, module):
        step = trainer.global_step - 1
        draw = torch.rand(1, generator=torch.Generator().manual_seed(module.step_seed))
        assert [b.replaces for b in module.stage._blocks] == (draw < module.stage.p(step)).tolist()
        seen.append(module.stage._blocks[0].replaces)

    replace = Replacing(epochs=2, learning_rate=1e-3, warmup=0.0)
    done = fit(Theseus(backbone="unused", replace=replace), "replace", dense, look=look)
    assert set(seen[: len(seen) // 2]) == {True, False} and all(seen[len(seen) // 2 + 1 :])
    done.stage.deploy(done.net)
    before, after = load_net(dense).state_dict(), done.net.state_dict()
    assert after.keys() < before.keys()
    for name, value in after.items():
        if "key.bias" not in name:  # which changes no probability of attention
            assert torch.equal(value, before[name]) == (".layer." not in name), name
    assert done.net.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("family", "settings", "error"),
    [
        ("bert", {"density": 0.4}, r"model\.density: 0\.4 leaves no number of blocks that divides 6; nearest valid "
                                   r"value 0\.3333; all: 0\.1667 \(1\), 0\.3333 \(2\), 0\.5 \(3\), 1 \(6\)"),
        ("albert", {}, r"blocks of 'albert' cannot be removed \(one block runs several times\); those of bert, "),
        ("t5", {}, r"blocks of 't5' cannot be removed \(blocks hand their positions on\)"),
        ("modernbert", {}, r"blocks of 'modernbert' cannot replace each other: they differ \(full_attention, sliding_"),
        ("bert", {"start": 1.5}, r"replace\.start: 1\.5 is not in \[0, 1\]"),
    ],
)  # fmt: skip
def test_refusals(family, settings, error):
    with pytest.raises(UserError, match=error):
        stage_for(**settings).check(make_net(family, **({"num_hidden_layers": 6} if family == "bert" else {})))


def test_more_refusals():
    with pytest.raises(UserError, match=r"replace\.rise: 40 steps leave none of the 30 of the stage for fine-tuning"):
        stage_for(rise=40).set_total_steps(30)
    with pytest.raises(UserError, match=r"replace\.rise: 1\.5 is neither a fraction of the steps nor a number of them"):
        stage_for(rise=1.5)
    stage = BlockReplacing(Replacing(), 0.5, Distillation(alpha_layers=2.0))
    with pytest.raises(UserError, match=r"distillation\.alpha_layers: 2 compares layers with the teacher's"):
        stage.check(make_net())
    assert blocks_left(12, 0.6, within=True) == 6  # a budget takes what fits
    with pytest.raises(UserError, match="nearest valid value 0\\.08333"):
        blocks_left(12, 0.05, within=True)
