"""Compressed forms of a BERT with random weights: what methods leave of it, in shapes that a GPU likes or does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import timing
from benchmarks.speed.low_rank import low_rank
from lit_compress.export.fuse import fuse
from lit_compress.models.cut import cut_units
from lit_compress.models.shorten import shorten, stack_lengths
from lit_compress.models.sites import of_kind, sublayers
from lit_compress.stages.rank_rule import RankRule

STEP = 64  # neurons of an aligned form


def forms(shape: str, only: Collection[str] = ()) -> dict[str, Any]:
    """Return name -> model, ``dense`` first; all have random weights, in evaluation mode.

    Args:
        shape: of :data:`benchmarks.timing.SHAPES`.
        only: names of the forms to make; () for all.
    """
    dense = timing.random_bert(shape).eval()
    makers: dict[str, Callable[[], Any]] = {"dense": lambda: dense}
    for density in (0.25, 0.10):
        for name, settings in {
            f"even, multiples of {STEP}": (STEP, True), "even, odd": (1, True),
            f"free, multiples of {STEP}": (STEP, False), "free, odd": (1, False),
        }.items():  # fmt: skip
            makers[f"{name}, {density:.2f}"] = partial(narrow, dense, density, *settings)
    makers["components, 0.10"] = partial(low_rank, dense, RankRule(0.10, stacked=True))
    makers["components, ranks of 16, 0.10"] = partial(low_rank, dense, RankRule(0.10, stacked=True, round_to=16))
    for share in (2, 4):
        makers[f"blocks, 1/{share}"] = partial(fewer_blocks, dense, share)
    return {name: make() for name, make in makers.items() if not only or name in only}


def narrow(dense: Any, density: float, step: int, even: bool) -> Any:
    """Return a copy with heads and neurons removed.

    Args:
        dense: the model.
        density: of the weights of the blocks.
        step: neurons are a multiple of it; 1: the largest odd number.
        even: as many in every block; else a sub-layer has between none and twice as many.
    """
    net, rng = copy.deepcopy(dense), np.random.default_rng(0)
    parts = sublayers(net)
    attentions, networks = of_kind(parts, "attention"), of_kind(parts, "ffn")
    first, whole = attentions[0], attentions[0].weights(net) + networks[0].weights(net)
    heads = max(1, int(density * first.count(net)))
    neurons = int((density * whole - heads * first.price(net)) / networks[0].price(net))
    neurons = neurons // step * step if step > 1 else neurons - 1 + neurons % 2
    kept = dict.fromkeys((part.last for part in attentions), heads)
    kept |= dict.fromkeys((part.last for part in networks), neurons)
    if not even:  # pairs of blocks: what one has less, the other has more
        order = rng.permutation(len(networks)).reshape(2, -1)
        for less, more in order.T:
            fewer = int(rng.integers(0, heads + 1))
            kept[attentions[less].last], kept[attentions[more].last] = heads - fewer, heads + fewer
            fewer = int(rng.integers(0, neurons // step + 1)) * step
            kept[networks[less].last], kept[networks[more].last] = neurons - fewer, neurons + fewer
    cut_units(net, {part.last: torch.arange(part.count(net)) < kept[part.last] for part in parts}, whole=True)
    return fuse(net)


def fewer_blocks(dense: Any, share: int) -> Any:
    """Return a copy with one of every ``share`` blocks."""
    net = copy.deepcopy(dense)
    shorten(net, {path: range(0, total, share) for path, (_, total) in stack_lengths(net).items()})
    return net
