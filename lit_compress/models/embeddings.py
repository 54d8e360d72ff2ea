"""Smaller tables of token embeddings: two factors, or rows of 8-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_compress.layers import Int8Embedding, LowRankEmbedding
from lit_compress.models.sites import size_at, token_table
from lit_compress.models.surgery import factorize, replace, stacked_weight
from lit_compress.numerics.decompose import decompose
from lit_compress.numerics.ranks import largest_rank
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_table(net: PreTrainedModel, rank: int | None, option: str) -> str:
    """Return the name of the table of token embeddings, which can be made smaller.

    Args:
        net: dense or compressed; only shapes are read.
        rank: of its factors; None: it is to be stored as integers.
        option: as the user typed it; the start of an error message.

    Raises:
        UserError: its tensor has other uses, or it is compressed already; ``rank`` makes it no smaller.
    """
    if (name := token_table(net)) is None:
        why = (
            "is factorized already" if isinstance(net.get_input_embeddings(), LowRankEmbedding)
            else "has other uses (an output layer, a second stack), or its own forward"
        )  # fmt: skip
        raise UserError(f"{option}: the table of token embeddings of '{net.config.model_type}' {why}; leave it out")
    width, rows = size_at(net, name)
    most = largest_rank(rows, width)
    if rank is not None and not 1 <= rank <= most:
        raise UserError(f"{option}: rank {rank} makes no table of {rows:,} x {width} smaller; the largest is {most}")
    return name


def shrink_shapes(net: PreTrainedModel, rank: int | None, option: str = "--embeddings") -> None:
    """Apply the shapes of :func:`shrink_table` to a ``net`` without values, in place."""
    name = check_table(net, rank, option)
    with torch.device("meta"):
        if rank is None:
            replace(net, name, Int8Embedding(*reversed(size_at(net, name))))
        else:
            factorize(net, {name: rank}, None)


@torch.no_grad()
def shrink_table(
    net: PreTrainedModel, rank: int | None, counts: Tensor | None = None, option: str = "--embeddings"
) -> float:
    """Replace the table of token embeddings of ``net``, in place, by two factors or by rows of 8-bit integers.

    Factors minimise sum_t (c_t + 1) ||w_t - x_t||^2 over the rows, with c_t the number of times that token t occurs.

    Args:
        net: changed in place.
        rank: of the factors; None: integers.
        counts: c [tokens]; None: all rows weigh the same.
        option: as the user typed it; the start of an error message.

    Returns:
        The error of the table, as a share of its norm.

    Raises:
        UserError: as :func:`check_table`.
    """
    name = check_table(net, rank, option)
    before = stacked_weight(net, (name,)).T
    if rank is None:
        replace(net, name, Int8Embedding.from_table(before))
    else:
        importance = None if counts is None else counts.double() + 1
        factorize(net, {name: rank}, lambda _, w, k: decompose(w, k, importance, axis="in", name=name))
    after = net.get_submodule(name)(torch.arange(len(before)))
    return float((after - before).norm() / before.norm())
