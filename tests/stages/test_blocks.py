"""Removal of blocks: the choice by naive loops, divergences, every family, what is refused."""

import copy
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from helpers import logits
from tiny import ALL, make_batch, make_net
from transformers import AutoConfig

from lit_compress.export.modelling import ordinary_net
from lit_compress.models.shorten import holds_first, stack_lengths
from lit_compress.numerics.losses import layer_distillation_loss
from lit_compress.stages.blocks import (
    GROUP,
    BlockLosses,
    BlockRemoval,
    KeptBlocks,
    all_blocks,
    divergences,
    evenly_spaced,
)
from lit_compress.stages.compression import CompressedStage
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError

FOUR = {
    "distilbert": {"n_layers": 4}, "gpt2": {"n_layer": 4}, "bart": {"encoder_layers": 4, "decoder_layers": 4},
    "t5": {"num_layers": 4, "num_decoder_layers": 4},
}  # fmt: skip
FAMILIES = [name for name, (family, _) in ALL.items() if family != "albert"]


def four_blocks(name, **more):
    family, settings = ALL[name]
    return make_net(family, dropout=0.0, **settings | FOUR.get(family, {"num_hidden_layers": 4}) | more).eval()


def least_missed(net, counts, batches, kind):
    return BlockLosses(counts).answer(net, batches, kind, None)


def removal(density=0.5, exact=False, **settings):
    return BlockRemoval(KeptBlocks(**settings), density, exact)


def stage(method):
    return CompressedStage("prune", method.settings, method)


def test_evenly_spaced_is_the_middle_of_equal_parts():
    for total in range(1, 33):
        for count in range(1, total + 1):
            numbers = evenly_spaced(total, count)
            assert numbers == [int((j + 0.5) * total / count) for j in range(count)]
            assert len(set(numbers)) == count and numbers == sorted(numbers) and numbers[-1] < total
            first = evenly_spaced(total, count, first=True)
            assert first == [0, *numbers[1:]] and len(set(first)) == count


def test_the_greedy_choice_removes_the_block_that_is_missed_the_least(monkeypatch):
    cost = {("a", 0): 5.0, ("a", 1): 1.0, ("a", 2): 4.0, ("b", 0): 2.0, ("b", 1): 3.0}
    cost_of_pair = {frozenset([("a", 1), ("b", 0)]): 9.0}  # together they are missed more

    def loss(kept):
        gone = {block for block in cost if block[1] not in kept[block[0]]}
        pairs = map(frozenset, itertools.combinations(gone, 2))
        return sum(cost[block] for block in gone) + sum(cost_of_pair.get(pair, 0.0) for pair in pairs)

    def chosen(a, b, first=False):
        monkeypatch.setattr("lit_compress.stages.blocks.stack_lengths", lambda _: {"a": (None, 3), "b": (None, 2)})
        monkeypatch.setattr("lit_compress.stages.blocks.holds_first", lambda _: first)
        monkeypatch.setattr(
            "lit_compress.stages.blocks.divergences", lambda _, choices, *__: [loss(kept) for kept in choices]
        )
        return least_missed(None, {"a": a, "b": b}, None, None)

    assert chosen(2, 1) == {"a": [0, 2], "b": [0]}
    assert chosen(1, 2) == {"a": [0], "b": [0, 1]}
    cost["a", 1], cost["a", 0] = 5.0, 0.5
    assert chosen(2, 2, first=True) == {"a": [0, 1], "b": [0, 1]}
    assert chosen(3, 2) == {"a": [0, 1, 2], "b": [0, 1]}


def exhaustive(search, net, loss):
    """What is left if every remaining block is tried again after every removal, and how many were."""
    kept, tried = all_blocks(net), 0
    while choices := search.choices(net, kept):
        losses = {block: loss(without) for block, without in choices.items()}
        best = min(choices, key=lambda block: losses[block])
        kept, tried = choices[best], tried + len(choices)
    return kept, tried


@pytest.mark.parametrize("seed", range(8))
def test_the_lazy_choice_is_the_exhaustive_one_if_no_rise_falls(seed, monkeypatch):
    """Pairs of blocks are missed more together."""
    draw, tried = random.Random(seed), []
    own = [draw.random() for _ in range(16)]
    pairs = [[draw.random() ** 4 for _ in range(16)] for _ in range(16)]

    def loss(kept):
        gone = [i for i in range(16) if i not in kept["a"]]
        return sum(own[i] for i in gone) + sum(pairs[i][j] for i, j in itertools.combinations(gone, 2))

    monkeypatch.setattr("lit_compress.stages.blocks.stack_lengths", lambda _: {"a": (None, 16)})
    monkeypatch.setattr("lit_compress.stages.blocks.holds_first", lambda _: False)
    monkeypatch.setattr(
        "lit_compress.stages.blocks.divergences",
        lambda _, choices, *__: tried.append(len(choices)) or [loss(kept) for kept in choices],
    )
    search = BlockLosses({"a": 6})
    kept, all_tried = exhaustive(search, None, loss)
    assert search.answer(None, None, None, None) == kept
    assert tried[0] == 16 and max(tried[1:]) == GROUP and sum(tried) < 0.8 * all_tried


def test_a_tiny_model_loses_the_same_blocks_with_fewer_trials_and_in_several_processes(monkeypatch):
    search = BlockLosses({"model.layers": 3})
    net = four_blocks("llama", num_hidden_layers=8, initializer_range=0.3).double()
    kind, batches, tried = task_type("classification"), [make_batch(seed=seed) for seed in (1, 2)], []

    def counted(*given):
        tried.append(len(given[1]))
        return divergences(*given)

    kept, all_tried = exhaustive(search, net, lambda kept: divergences(net, [kept], batches, kind)[0])
    monkeypatch.setattr("lit_compress.stages.blocks.divergences", counted)
    assert search.answer(net, batches, kind, None) == kept
    assert sum(tried) < all_tried
    barrier, totals = Barrier(2), {}

    def process(rank):
        def reduce(total):
            totals[rank] = total.clone()
            barrier.wait()
            total.copy_(totals[0] + totals[1])
            barrier.wait()

        return search.answer(copy.deepcopy(net), batches[rank : rank + 1], kind, reduce)

    with ThreadPoolExecutor() as pool:
        one, other = pool.map(process, range(2))
    assert one == other == kept


def naive(net, kept):
    """The blocks one after the other in a copy of the model."""
    small = copy.deepcopy(net)
    if hasattr(small.config, "use_cache"):
        small.config.use_cache = False
    for path, numbers in kept.items():
        parent, _, name = path.rpartition(".")
        old = small.get_submodule(path)
        types = getattr(small.config, "layer_types", None)
        setattr(small.get_submodule(parent), name, torch.nn.ModuleList([old[i] for i in numbers]))
        if types:
            small.config.layer_types = [types[i] for i in numbers]
        stack = small.get_submodule(parent)
        for config in {id(c): c for c in (small.config, getattr(stack, "config", small.config))}.values():
            if not config.is_encoder_decoder:
                config.num_hidden_layers = len(numbers)
    return small


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_becomes_an_ordinary_model_of_fewer_blocks(name, tmp_path):
    net, method = four_blocks(name), removal(0.5)
    method.check(net)
    totals = {path: total for path, (_, total) in stack_lengths(net).items()}
    if name in ("bart-uneven", "t5-gated"):  # one list has one block
        totals = {path: 1 if total == 1 else total for path, total in totals.items()}
    if min(totals.values()) == 1:
        with pytest.raises(UserError, match="nearest valid value 1"):
            method.counts(net)
        return
    dense, kept = copy.deepcopy(net), method.plan(net)
    assert all(numbers == ([0, 3] if holds_first(net) else [1, 3]) for numbers in kept.values())
    method.fill(net, kept)
    assert torch.equal(logits(net), logits(naive(dense, kept)))
    assert method.density_left(net) == 0.5
    ordinary = ordinary_net(net)
    assert ordinary is not None and torch.allclose(logits(ordinary), logits(net), atol=1e-6)
    ordinary.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_hidden_layers == 2
    again = type(ordinary).from_pretrained(tmp_path).eval()  # plain transformers
    assert torch.equal(logits(again), logits(ordinary))


def test_lists_that_say_what_each_block_is_are_cut():
    net = make_net("gemma3_text", num_hidden_layers=6, sliding_window_pattern=3)
    types = list(net.config.layer_types)
    stage(removal(0.5)).outline(net)
    assert net.config.layer_types == [types[i] for i in (1, 3, 5)] and net.config.num_hidden_layers == 3
    assert [block.self_attn.layer_idx for block in net.model.layers] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "gemma3_text", "deberta-v2", "bart", "t5", "modernbert"])
def test_the_divergence_without_a_block_is_that_of_the_model_without_it(name):
    net, kind = four_blocks(name).double(), task_type("classification")
    batches = [make_batch(seed=seed) for seed in (1, 2)]
    batches[1]["index"][-1] = -1  # fills the batch up
    whole = {path: list(range(4)) for path in stack_lengths(net)}
    choices = [whole | {path: [0, 1, 3]} for path in whole] + [whole | {path: [0] for path in whole}]
    found = divergences(net, choices, batches, kind)
    for kept, value in zip(choices, found, strict=True):
        small, total, rows = naive(net, kept), 0.0, 0
        for batch in batches:
            for i in range(4):
                if batch["index"][i] < 0:
                    continue
                inputs = {key: batch[key][i : i + 1] for key in ("input_ids", "attention_mask")}
                with torch.no_grad():
                    p, q = (kind.run(n, inputs).logits.log_softmax(-1) for n in (net, small))
                total, rows = total + float((p.exp() * (p - q)).sum()), rows + 1
        assert value == pytest.approx(total / rows, rel=1e-5)
    kept = least_missed(net, dict.fromkeys(whole, 3), batches, kind)
    assert all(map(len, kept.values()))
    assert not net.training and all(len(net.get_submodule(path)) == 4 for path in whole)


def test_a_candidate_runs_only_the_blocks_behind_it(monkeypatch):
    """Per batch: 4 blocks and those behind each of 4; then 4, the 3 that are left, and those behind each of these."""
    net, kind, batches = four_blocks("llama"), task_type("classification"), [make_batch()]
    runs, kind_of_block = [], type(net.model.layers[0])
    forward = kind_of_block.forward
    monkeypatch.setattr(kind_of_block, "forward", lambda *args, **given: runs.append(1) or forward(*args, **given))
    least_missed(net, {"model.layers": 2}, batches, kind)
    assert len(runs) == (4 + 3 + 2 + 1 + 0) + (4 + 3 + 2 + 1 + 0)


def test_an_answer_that_is_not_finite_is_refused():
    net = four_blocks("bert")
    net.classifier.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="calibration: an answer of the model is not finite"):
        least_missed(net, {"bert.encoder.layer": 3}, [make_batch()], task_type("classification"))


def test_hidden_states_learn_from_evenly_spaced_ones():
    """State j of the k + 1 from state round(j n / k), halves to even."""
    method, teacher = removal(0.67), [torch.randn(2, 3, 4) for _ in range(7)]
    method.fill(net := make_net(num_hidden_layers=6), method.plan(net))
    student = [torch.randn(2, 3, 4) for _ in range(5)]
    found = stage(method).layer_loss(student, teacher, None, False)
    assert torch.equal(found, layer_distillation_loss(student, [teacher[i] for i in (0, 2, 3, 4, 6)], None))


def test_the_density_is_the_largest_number_of_blocks_that_fits():
    net = make_net(num_hidden_layers=6)
    for density, count in ((0.17, 1), (0.33, 2), (0.34, 2), (0.4, 2), (0.5, 3), (0.66, 3), (0.67, 4), (0.99, 5)):
        method = removal(density)
        assert method.counts(net) == {"bert.encoder.layer": count}
    assert removal(0.33, exact=True).counts(net) == {"bert.encoder.layer": 1}  # of a budget, which is a limit


@pytest.mark.parametrize(
    ("method", "family", "text"),
    [
        (removal(0.1), "bert", "model.density: 0.1 keeps none of 2 blocks; nearest valid value 0.5"),
        (removal(0.5), "albert", "model.backbone: blocks of 'albert' cannot be removed .one block runs"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(method, family, text):
    with pytest.raises(UserError, match=text):
        method.check(make_net(ALL[family][0], **ALL[family][1]))
