"""Refinement: a block's outputs learn the dense ones; in memory as by block; what it cannot do is one line."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import make_batch, make_net
from torch import nn

from lit_compress.calibration.walk import Walk, calibration_parts
from lit_compress.models.block_net import one_by_one
from lit_compress.models.cut import cut_units
from lit_compress.models.shorten import stack_lengths
from lit_compress.models.sites import sublayers
from lit_compress.stages.blocks import BlockRemoval, KeptBlocks
from lit_compress.stages.refinement import FIRST, Refinement, check_refinement, rates, refine_net, token_errors
from lit_compress.tasks import KINDS
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json

KIND = KINDS["classification"]


def test_errors_of_tokens_are_those_of_a_loop():
    torch.manual_seed(0)
    outputs, targets = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    errors = [
        sum((outputs[i, t, j] - targets[i, t, j]) ** 2 for j in range(4)) / sum(targets[i, t, j] ** 2 for j in range(4))
        for i in range(3)
        for t in range(5)
        if mask[i, t]
    ]
    assert token_errors(outputs, targets, mask) == pytest.approx(float(sum(errors) / len(errors)))
    weighted = sum(errors) + 15 * sum(errors[i] for i in (0, 5, 7))
    assert token_errors(outputs, targets, mask, 16) == pytest.approx(float(weighted / (len(errors) + 45)))
    left = [values.flip(1) for values in (outputs, targets, mask)]  # padding before a text
    assert token_errors(*left, 16) == pytest.approx(float(sum(errors) + 15 * sum(errors[i] for i in (4, 6, 10))) / 56)
    targets[0, 0] = 0  # a token without a size does not divide by 0
    assert torch.isfinite(token_errors(targets, targets, mask)) and token_errors(targets, targets, mask) == 0


def test_a_rate_follows_the_size_of_its_parameter():
    parameters = [nn.Parameter(torch.full((2, 2), 3.0)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(1))]
    assert [group["lr"] for group in rates(parameters, 0.1)] == pytest.approx([0.3, 0.1, 0.1])
    assert rates([nn.Parameter(torch.zeros(2))], 0.1)[0]["lr"] == 0.1


class Block(nn.Module):
    """A block that maps every token by itself: linear, and bent if it is dense."""

    def __init__(self, weight: torch.Tensor, bent: bool) -> None:
        super().__init__()
        self.map, self.bent = nn.Linear(8, 8), bent
        self.map.weight.data = weight

    def forward(self, hidden_states, *args, **kwargs):
        output = self.map(hidden_states)
        return output.tanh() + 0.1 if self.bent else output


def batches(count=6, length=7):
    made = [make_batch(4, length, seed=seed) for seed in range(count)]
    return [batch | {"index": batch["index"] + 4 * i} for i, batch in enumerate(made)]


def test_linear_blocks_become_the_least_squares(tmp_path, monkeypatch):
    """The second block reads what the refined first one gives, and fits what the dense one makes of dense states."""
    net, small = (make_net("bert", "sst2", hidden_size=8, num_attention_heads=2).eval() for _ in range(2))
    torch.manual_seed(0)
    for layer, other in zip(net.bert.encoder.layer, small.bert.encoder.layer, strict=True):
        weight = torch.randn(8, 8) / 3
        for module, bent in ((layer, True), (other, False)):
            module.__class__, module.__dict__ = Block, Block(weight.clone(), bent).__dict__
    parts, read = calibration_parts(KIND, [make_batch(16, 7)], None), {}
    with one_by_one(net, "cpu") as dense, one_by_one(small, "cpu") as own, torch.no_grad():
        walks = [Walk(blocks, KIND, parts, tmp_path / name) for blocks, name in ((dense, "dense"), (own, "own"))]
        monkeypatch.setattr("lit_compress.stages.refinement.RATE", 0.1)
        refinement = Refinement(*walks, 1000)
        mask = torch.cat([rows["attention_mask"].flatten() for rows in parts]) != 0
        for i in range(2):
            with own.block(i) as block:
                block.register_forward_pre_hook(lambda _, args: read.setdefault("x", []).append(args[0]))
                refinement(i, block)
            x = torch.cat([x.flatten(0, 1) for x in read.pop("x")[: len(parts)]])[mask].double()
            x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
            y = torch.cat([y.flatten(0, 1) for y in walks[0].states(i + 1)])[mask].double()
            weights = 1 / y.norm(dim=1, keepdim=True)  # an error is relative to its token's target
            best = torch.linalg.pinv(x * weights, rtol=1e-4) @ (y * weights)  # a norm before it: not of full rank
            least = float(((x @ best - y) * weights).square().sum(1).mean())
            told = read_json("--refine", walks[1].folder / f"refined-{i:05}.json", dict)
            assert least > 0.01 and told["after"] < told["before"]
            assert told["after"] == pytest.approx(least, rel=1e-3), i


def test_a_block_that_gains_nothing_stays_as_it_was(tmp_path):
    net = make_net("llama", "sst2", initializer_range=0.2).eval()
    small, parts = copy.deepcopy(net), calibration_parts(KIND, batches(2), None)
    told = refine_net(net, small, KIND, parts, 3, tmp_path, torch.device("cpu"))
    assert told["before"] == told["after"] == [0, 0] and (told["steps"], told["texts"]) == (3, 8)
    assert told["tokens"] == sum(int(rows["attention_mask"].sum()) for rows in parts)
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), small.parameters(), strict=True))
    assert all(value.requires_grad for value in small.parameters()) and small.config.use_cache == net.config.use_cache


def test_a_block_without_sublayers_has_nothing_to_learn(tmp_path):
    net = make_net("llama", "sst2", initializer_range=0.2).eval()
    small, parts = copy.deepcopy(net), calibration_parts(KIND, batches(2), None)
    cut_units(
        small, {part.last: torch.zeros(part.count(net)) > 0 for part in sublayers(net, gated=False)[:2]}, whole=True
    )
    told = refine_net(net, small, KIND, parts, 3, tmp_path, torch.device("cpu"))
    assert told["after"][0] == told["before"][0] > 0 and told["after"][1] < told["before"][1]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_kept_blocks_learn_the_work_of_removed_ones(family, tmp_path):
    """Of four blocks the second and the third stay: they learn the states behind the second and the fourth."""
    net = make_net(family, "sst2", num_hidden_layers=4, initializer_range=0.2).eval()
    small, [path] = copy.deepcopy(net), stack_lengths(net)
    method = BlockRemoval(KeptBlocks(), 0.5)
    method.fill(small, {path: [1, 2]})
    assert method.behind == [2, 4]
    parts = calibration_parts(KIND, batches(), None)
    with torch.no_grad():
        states = KIND.run(net, parts[0], output_hidden_states=True).hidden_states
        own = KIND.run(small, parts[0], output_hidden_states=True).hidden_states
    mask, counts = parts[0]["attention_mask"], FIRST if family == "llama" else 1
    first = token_errors(own[1], states[2], mask, counts)
    outputs = []
    told = refine_net(net, small, KIND, parts[:1], 30, tmp_path, torch.device("cpu"), method.behind)
    assert told["before"][0] == pytest.approx(float(first), rel=1e-5)
    for model, number in ((net, 3), (small, 1)):  # a decoder's last hidden states come from behind its norm
        module = model.get_submodule(f"{path}.{number}")
        module.register_forward_hook(
            lambda _, __, output: outputs.append(output if torch.is_tensor(output) else output[0])
        )
        with torch.no_grad():
            KIND.run(model, parts[0])
    last = token_errors(outputs[1], outputs[0], mask, counts)
    assert told["after"][1] == pytest.approx(float(last), rel=1e-4)
    assert all(after < before for before, after in zip(told["before"], told["after"], strict=True))


@pytest.mark.parametrize(
    ("family", "dense_states", "message"),
    [
        ("llama", False, "--refine: SliceGPT leaves no dense hidden states"),
        ("albert", True, "--refine: 'albert' cannot go block by block"),
        ("t5", True, "--refine: 't5' cannot go block by block"),
    ],
)
def test_what_cannot_be_refined_is_one_line(family, dense_states, message):
    with pytest.raises(UserError, match=message):
        check_refinement(make_net(family, "sst2"), dense_states, "SliceGPT")
