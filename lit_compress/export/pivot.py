"""Pivot form of a model's low-rank matrices: the same outputs with k^2 parameters fewer for every matrix of rank k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_compress.layers import LowRankLinear, LowRankRowsLinear, PivotLinear, StackedLowRankLinear
from lit_compress.models.surgery import link, replace
from lit_compress.numerics.pivot import has_pivots, pivot_form
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pivot_sites(net: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the names of the matrices of ``net`` that have a pivot form; those on one right factor are together."""
    stacks: dict[str, list[str]] = {}
    for name, module in net.named_modules():
        if isinstance(module, PivotLinear):
            continue
        if isinstance(module, LowRankLinear) or (isinstance(module, LowRankRowsLinear) and module.left is not None):
            stacks[name] = [name]
        elif isinstance(module, StackedLowRankLinear):
            stacks.setdefault(module.first or name, []).append(name)
    return [tuple(names) for names in stacks.values()]


def check_pivot(net: PreTrainedModel) -> None:
    """Refuse a model without low-rank matrices.

    Raises:
        UserError: ``net`` has none.
    """
    if not pivot_sites(net):
        raise UserError("export: --pivot is for matrices that are stored as factors; this model has none, leave it out")


@torch.no_grad()
def to_pivot_form(net: PreTrainedModel) -> dict[str, int]:
    """Bring the low-rank matrices of ``net`` into pivot form, in place; its outputs stay the same.

    A matrix whose left factor has dependent columns stays unchanged.

    Returns:
        Parameters saved, by the (first) name of a matrix or of a stack.
    """
    saved = {}
    sites = pivot_sites(net)
    for names in track(sites, "pivot form", len(sites)):
        before: list[Any] = [net.get_submodule(name) for name in names]
        one = before[0]
        after = _with_rows(one) if isinstance(one, LowRankRowsLinear) else _stack(before, names[0])
        if not after:
            continue
        for name, layer in zip(names, after, strict=True):
            replace(net, name, layer)
        saved[names[0]] = sum(p.numel() for layer in before for p in layer.parameters()) - sum(
            p.numel() for layer in after for p in layer.parameters()
        )
    link(net)
    return saved


def pivot_shapes(net: PreTrainedModel) -> None:
    """Bring the low-rank matrices of a ``net`` without values into pivot form, in place.

    How many pivots each of several matrices on one right factor has depends on values; here the first have them all.
    """
    for names in pivot_sites(net):
        layers: list[Any] = [net.get_submodule(name) for name in names]
        rank, first = layers[0].rank, ""
        for name, layer in zip(names, layers, strict=True):
            rows = getattr(layer, "rows", 0)
            pivots = min(rank, layer.out_features - rows)
            rank, rest, bias = rank - pivots, layer.out_features - rows - pivots, layer.bias is not None
            with torch.device("meta"):
                made = PivotLinear(
                    layer.in_features, layer.out_features, layers[0].rank, rest, rows, bias, first, len(names)
                )
            replace(net, name, made)
            first = names[0]
    link(net)


def _stack(layers: list[Any], first: str) -> list[PivotLinear]:
    """Return the pivot form of layers on one right factor, or of one; the pivots are rows of any. [] without one."""
    left, right = torch.cat([layer.left for layer in layers]), layers[0].factors()[1]
    if not has_pivots(left):
        return []
    form = pivot_form(left, right, first)
    rank, made = len(right), []
    for layer, places in zip(layers, form.order.argsort().split([len(x.left) for x in layers]), strict=True):
        own = places >= rank  # outputs that are no pivots
        order = torch.where(own, rank + own.cumsum(0) - 1, places)
        name = "" if layer is layers[0] else first
        made.append(
            PivotLinear.from_parts(form.right, form.rest[places[own] - rank], order, layer.bias, name, len(layers))
        )
    return made


def _with_rows(layer: LowRankRowsLinear) -> list[PivotLinear]:
    """Return the pivot form of factors and rows; a kept row becomes the whole row of the matrix. [] without one."""
    assert layer.left is not None
    rank, index = layer.rank, layer.index.long()
    kept = torch.zeros(layer.out_features, dtype=torch.bool).index_fill(0, index, True)
    left, right = layer.left[~kept], layer.right[:rank]
    if not has_pivots(left):
        return []
    form = pivot_form(left, right)
    order = torch.zeros(layer.out_features, dtype=torch.int64)
    order[index] = rank + torch.arange(layer.rows)
    places = form.order.argsort()
    order[~kept] = torch.where(places < rank, places, places + layer.rows)
    whole = layer.right[rank:] + layer.left[index] @ right
    return [PivotLinear.from_parts(torch.cat([form.right, whole]), form.rest, order, layer.bias)]
