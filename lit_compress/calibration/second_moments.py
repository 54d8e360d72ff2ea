"""Second moments (Gram matrices) of a model's hidden states and heads on some training tokens, and their axes.

SP3, section 3.1. A number of tokens is drawn from all real tokens of the examples, the same for every module. Gram
matrices are summed in float64 batch by batch, so memory does not depend on the number of tokens. The result does not
depend on how examples are batched, on padding, or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

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
    run: Callable[[Model, Batch], object] = lambda net, batch: net(**inputs_of(batch)),
    masks: Callable[[Batch], Sequence[Tensor]] = lambda batch: [batch["attention_mask"]],
    reduce: Callable[[Tensor], object] | None = None,
) -> Grams:
    """Do forwards of all examples and sum the Gram matrices at the model's sites and heads.

    Args:
        net: dense, not wrapped; runs on its device, in evaluation mode and its own dtype.
        batches: examples with ``index`` 0 .. n - 1, each once (over all ranks); rows with -1 only fill up a batch.
        tokens: number of tokens to draw in each stack (encoder, decoder).
        run: function that does a forward of the model on a batch, which is on its device.
        masks: function that returns for each stack of a batch [batch, length], not 0 at real tokens.
        reduce: in-place all-reduce (SUM) of a tensor over ranks with other examples.

    Raises:
        UserError: there are fewer tokens than dimensions, or an activation is inf or NaN.
    """
    kept, stream, device = list(batches), residual_stream(net), net.device
    stacks = list(dict.fromkeys(place.stack for place in stream.sites))
    flags = [_flags(net, kept, [masks(b)[i] for b in kept], tokens, seed, reduce) for i in range(len(stacks))]
    attentions = stream.attentions if has_head_projections(net) else []
    count, d, wide = net.config.num_attention_heads, net.config.hidden_size, head_width(net, "encoder")
    zeros = partial(torch.zeros, dtype=torch.float64, device=place_of_sums(device))
    sites, heads = zeros(len(stream.rotatable), d, d), zeros(len(attentions), 3, count, wide, wide)
    chosen = dict[str, Tensor]()  # of the forward: the tokens that count, by stack

    def of_site(i: int, name: str, x: Tensor, _: Tensor) -> None:
        taken = double(x.flatten(0, -2)[chosen[stream.sites[i].stack]])
        sites[i] += taken.mT @ taken

    def of_heads(i: int, role: str, name: str, _: Tensor, y: Tensor) -> None:
        taken = double(y.flatten(0, -2)[chosen[stream.sites[attentions[i].roles[role]].stack]])
        taken = taken.unflatten(1, (count, -1)).transpose(0, 1)
        heads[i, "qkv".index(role)] += taken.mT @ taken

    add: dict[str, Callable[..., None]] = {
        name: partial(of_site, i) for i, place in enumerate(stream.rotatable) for name in place.norms
    }
    for i, sublayer in enumerate(attentions):
        add |= {sublayer.sites[role]: partial(of_heads, i, role) for role in "qkv"}
    watched = hooked({name: net.get_submodule(name) for name in add}, lambda name, x, y: add[name](name, x, y))
    with frozen(net), watched, torch.autocast(device.type, enabled=False):
        for number, batch in enumerate(track(kept, "calibrate", len(kept))):
            chosen |= {stack: own[number].to(device) for stack, own in zip(stacks, flags, strict=True)}
            run(net, {name: value.to(device) for name, value in batch.items()})
    for total in (sites, heads) if reduce is not None else ():
        reduce(total)  # type: ignore[misc]
    return Grams(sites.cpu(), heads.cpu())


def _flags(
    net: Model, batches: Sequence[Batch], masks: Sequence[Tensor], tokens: int, seed: int,
    reduce: Callable[[Tensor], object] | None,
) -> list[Tensor]:  # fmt: skip
    """Return for every batch which positions of one stack are drawn, bool [batch * length]; ``masks`` are its own."""
    count = torch.tensor([1 + max((int(b["index"].max()) for b in batches), default=-1)], device=net.device)
    if reduce is not None:  # the largest over the ranks is at most the sum
        reduce(count)
    lengths = torch.zeros(int(count), dtype=torch.int64, device=net.device)
    real = [mask.bool().view(len(batch["index"]), -1) for batch, mask in zip(batches, masks, strict=True)]  # by row
    for batch, mask in zip(batches, real, strict=True):
        own = batch["index"] >= 0
        lengths[batch["index"][own].to(net.device)] = mask.sum(1)[own].to(net.device)
    if reduce is not None:
        reduce(lengths)
    taken, d = min(tokens, int(lengths.sum())), net.config.hidden_size
    if taken < d:
        hint = "" if tokens < d else "the examples have no more, add some: "
        raise UserError(f"prune.tokens: {taken} tokens are fewer than the {d} dimensions; {hint}give at least {d}")
    drawn, flags = draw_tokens(lengths.cpu(), tokens, seed), [torch.zeros_like(mask) for mask in real]
    for batch, mask, flag in zip(batches, real, flags, strict=True):
        for row, index in enumerate(batch["index"].tolist()):
            if index >= 0:
                flag[row, mask[row]] = drawn[index].to(mask.device)
    return [flag.flatten() for flag in flags]


def bases_of(grams: Grams, centred: bool = True) -> Bases:
    """Return the projections, by falling energy.

    ``centred`` removes the mean of each input over its dimensions (R); False for axes without R.
    """
    axes = [(centred_axes if centred else principal_axes)(gram)[0] for gram in grams.sites]
    query, key, value = [], [], []
    for q, k, v in grams.heads:
        pairs = [query_key_projections(a, b) for a, b in zip(q, k, strict=True)]
        query.append(torch.stack([of_queries for of_queries, _ in pairs]))
        key.append(torch.stack([of_keys for _, of_keys in pairs]))
        value.append(principal_axes(v)[0].mT.contiguous())
    return Bases(axes, query, key, value)
