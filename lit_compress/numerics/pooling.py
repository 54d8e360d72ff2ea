"""Poolings: from the states of a text's tokens to one vector, as sentence-transformers names and computes them."""

from __future__ import annotations

from torch import Tensor

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(states: Tensor, mask: Tensor, name: str) -> Tensor:
    """Return the vectors [rows, width] of texts, padded on either side.

    Args:
        states: [rows, tokens, width].
        mask: [rows, tokens], 1 at the tokens of the text, which are neighbours, and 0 at padding.
        name: one of ``POOLINGS``. ``weightedmean`` weighs the k-th token of a text by k.
    """
    if name == "max":
        return states.masked_fill(mask[..., None] == 0, -float("inf")).amax(1)
    place = mask.cumsum(1) * mask  # 1, 2, ... at the tokens of a text
    count = mask.sum(1, keepdim=True)
    weights = {"cls": place == 1, "lasttoken": (place == count) & (mask != 0), "weightedmean": place}.get(name, mask)
    total = weights.sum(1, keepdim=True).clamp_min(1).to(states.dtype)
    return (states * weights.to(states.dtype)[..., None]).sum(1) / (
        total.sqrt() if name == "mean_sqrt_len_tokens" else total
    )
