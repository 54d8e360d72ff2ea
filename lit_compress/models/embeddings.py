"""Smaller tables of token embeddings: rows of 8-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_compress.layers import Int8Embedding, LowRankEmbedding
from lit_compress.models.sites import size_at, token_table
from lit_compress.models.surgery import replace, stacked_weight
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def table_bytes(net: PreTrainedModel) -> int:
    """Return the size of the table of token embeddings of ``net``."""
    return sum(p.nbytes for p in net.get_input_embeddings().parameters())


def check_table(net: PreTrainedModel) -> str:
    """Return the name of the table of token embeddings, which can be made smaller.

    Args:
        net: dense or compressed; only shapes are read.

    Raises:
        UserError: its tensor has other uses, or it is compressed already.
    """
    if (name := token_table(net)) is None:
        why = (
            "is factorized already" if isinstance(net.get_input_embeddings(), LowRankEmbedding)
            else "has other uses (an output layer, a second stack), or its own forward"
        )  # fmt: skip
        raise UserError(
            f"export: --embeddings int8: the table of token embeddings of '{net.config.model_type}' {why}; leave it out"
        )
    return name


def shrink_shapes(net: PreTrainedModel) -> None:
    """Apply the shapes of :func:`shrink_table` to a ``net`` without values, in place."""
    name = check_table(net)
    with torch.device("meta"):
        replace(net, name, Int8Embedding(*reversed(size_at(net, name))))


@torch.no_grad()
def shrink_table(net: PreTrainedModel) -> float:
    """Replace the table of token embeddings of ``net``, in place, by rows of 8-bit integers.

    Returns:
        The error of the table, as a share of its norm.

    Raises:
        UserError: as :func:`check_table`.
    """
    name = check_table(net)
    before = stacked_weight(net, (name,)).T
    replace(net, name, Int8Embedding.from_table(before))
    after = net.get_submodule(name)(torch.arange(len(before)))
    return float((after - before).norm() / before.norm())
