"""Second moments (Gram matrices) of a model's hidden states and heads on some training tokens, and their axes.

SP3, section 3.1. A number of tokens is drawn from all real tokens of the examples, the same for every module. Gram
matrices are summed in float64 batch by batch, so memory does not depend on the number of tokens. The result does not
depend on how examples are batched, on padding, or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_compress.calibration.statistics import Batch, frozen, hooked
from lit_compress.models.projected.projections import Bases
from lit_compress.models.residual_stream import has_head_projections, residual_stream
from lit_compress.models.sites import Model, head_width
from lit_compress.numerics.pca import centred_axes, principal_axes, query_key_projections
from lit_compress.tasks.base import inputs_of
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track


@dataclass(frozen=True)
class Grams:
    """Sums of x x^T over the drawn tokens, float64.

    Attributes:
        sites: [sites, d, d], of the norms' inputs at every site whose basis can be changed.
        heads: [attentions, 3, heads, d_h, d_h], of queries, keys and values with their biases, over all uses of an
            attention; no attentions where heads cannot be projected.
    """

    sites: Tensor
    heads: Tensor


def draw_tokens(lengths: Tensor, tokens: int, seed: int) -> list[Tensor]:
    """Return for every example which of its real tokens are drawn, bool [length]: ``tokens`` of all, or all of fewer.

    ``lengths`` int [examples] are the numbers of real tokens.
    """
    total = int(lengths.sum())
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:tokens]] = True
    return list(chosen.split(lengths.tolist()))


@torch.no_grad()
def collect_grams(
    net: Model,
    batches: Iterable[Batch],
    tokens: int,
    seed: int = 0,
    group: int = 1,
    run: Callable[[Model, Batch], object] = lambda net, batch: net(**inputs_of(batch)),
    masks: Callable[[Batch], Sequence[Tensor]] = lambda batch: [batch["attention_mask"]],
    reduce: Callable[[Tensor], object] | None = None,
) -> Grams:
    """Do forwards of all examples and sum the Gram matrices at the model's sites and heads.

    Args:
        net: dense, not wrapped; runs on its device, in evaluation mode and its own dtype.
        batches: examples with ``index`` 0 .. n - 1, each once (over all ranks); rows with -1 only fill up a batch.
        tokens: number of tokens to draw in each stack (encoder, decoder).
        group: sub-layers that share a basis, see :func:`~lit_compress.models.residual_stream.residual_stream`.
        run: function that does a forward of the model on a batch, which is on its device.
        masks: function that returns for each stack of a batch [batch, length], not 0 at real tokens.
        reduce: in-place all-reduce (SUM) of a tensor over ranks with other examples.

    Raises:
        UserError: there are fewer tokens than dimensions, or an activation is inf or NaN.
    """
    kept = list(batches)
    count = torch.tensor([1 + max((int(b["index"].max()) for b in kept), default=-1)], device=net.device)
    if reduce is not None:  # the largest over the ranks is at most the sum
        reduce(count)
    sums, flags = _Sums(net, group), []
    for stack in range(len(sums.stacks)):
        lengths = torch.zeros(int(count), dtype=torch.int64, device=net.device)
        for batch in kept:
            real = batch["index"] >= 0
            per_row = masks(batch)[stack].ne(0).view(len(real), -1).sum(1)[real]  # of all texts of a row
            lengths[batch["index"][real].to(net.device)] = per_row.to(net.device)
        if reduce is not None:
            reduce(lengths)
        flags.append(draw_tokens(lengths.cpu(), tokens, seed))
        taken, d = min(tokens, int(lengths.sum())), net.config.hidden_size
        if taken < d:
            hint = "" if tokens < d else "the examples have no more, add some: "
            raise UserError(f"prune.tokens: {taken} tokens are fewer than the {d} dimensions; {hint}give at least {d}")
    with sums.watch(), torch.autocast(net.device.type, enabled=False):
        for batch in track(kept, "calibrate", len(kept)):
            drawn = []
            for mask, flag in zip(masks(batch), flags, strict=False):
                real = mask.bool().view(len(batch["index"]), -1)
                drawn.append(torch.zeros_like(real))
                for row, index in enumerate(batch["index"].tolist()):
                    if index >= 0:
                        drawn[-1][row, real[row]] = flag[index].to(mask.device)
            sums.begin([chosen.flatten() for chosen in drawn])
            run(net, {name: value.to(net.device) for name, value in batch.items()})
    if reduce is not None:
        reduce(sums.sites)
        reduce(sums.heads)
    return Grams(sums.sites.cpu(), sums.heads.cpu())


def bases_of(grams: Grams, centred: bool = True) -> tuple[Bases, Tensor]:
    """Return the projections, and the share of every direction in the energy of its site [sites, d], falling.

    ``centred`` removes the mean of each input over its dimensions (R); False for axes without R.
    """
    axes_of = [(centred_axes if centred else principal_axes)(gram) for gram in grams.sites]
    query, key, value = [], [], []
    for q, k, v in grams.heads:
        pairs = [query_key_projections(a, b) for a, b in zip(q, k, strict=True)]
        query.append(torch.stack([of_queries for of_queries, _ in pairs]))
        key.append(torch.stack([of_keys for _, of_keys in pairs]))
        value.append(principal_axes(v)[0].mT.contiguous())
    shares = torch.zeros(grams.sites.shape[:2], dtype=torch.float64)
    for row, (_, energy) in zip(shares, axes_of, strict=True):
        row.copy_(energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny))
    return Bases([axes for axes, _ in axes_of], query, key, value), shares


class _Sums:
    """The sums of Gram matrices, and the hooks that add to them."""

    def __init__(self, net: Model, group: int) -> None:
        self.net, self.stream = net, residual_stream(net, group)
        self.stacks = list(dict.fromkeys(place.stack for place in self.stream.sites))
        heads, d, wide = net.config.num_attention_heads, net.config.hidden_size, head_width(net, "encoder")
        self.attentions = self.stream.attentions if has_head_projections(net) else []
        options: dict[str, Any] = {"dtype": torch.float64, "device": place_of_sums(net.device)}
        self.sites = torch.zeros(len(self.stream.rotatable), d, d, **options)
        self.heads = torch.zeros(len(self.attentions), 3, heads, wide, wide, **options)

    def begin(self, chosen: list[Tensor]) -> None:
        """Set the tokens of the next forward that count: ``chosen``, bool [batch * length] per stack."""
        self.chosen = {s: c.to(self.net.device) for s, c in zip(self.stacks, chosen, strict=True)}
        self.seen: set[tuple[int, int]] = set()

    def _site(self, i: int, x: Tensor, _: Tensor) -> None:
        taken = double(x.flatten(0, -2)[self.chosen[self.stream.sites[i].stack]])
        self.sites[i] += taken.mT @ taken

    def _heads(self, i: int, role: str, _: Tensor, y: Tensor) -> None:
        sublayer, kind = self.attentions[i], "qkv".index(role)
        if (i, kind) in self.seen and getattr(self.net.config, "relative_attention", False):
            return  # DeBERTa projects its relative positions afterwards
        self.seen.add((i, kind))
        stack = self.stream.sites[sublayer.roles[role]].stack
        taken = double(y.flatten(0, -2)[self.chosen[stack]])
        heads = taken.unflatten(1, (self.heads.shape[2], -1)).transpose(0, 1)
        self.heads[i, kind] += heads.mT @ heads

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Set evaluation mode and hooks at every site, q, k and v inside the context; undo both afterwards."""
        add: dict[str, Callable[[Tensor, Tensor], None]] = {}
        for i, place in enumerate(self.stream.rotatable):
            add |= {name: partial(self._site, i) for name in place.norms}
        for i, sublayer in enumerate(self.attentions):
            add |= {sublayer.sites[role]: partial(self._heads, i, role) for role in "qkv"}
        modules = {name: self.net.get_submodule(name) for name in add}
        with frozen(self.net), hooked(modules, lambda name, x, y: add[name](x, y)):
            yield
