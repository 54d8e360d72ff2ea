"""Recomputation: blocks forget their activations and compute them again in the backward.

Chen, Xu, Zhang, Guestrin 2016, "Training Deep Models with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174. One
hidden state per block stays, and the activations of one block at a time. A step takes about a third more time, and its
gradients are the same. Random numbers are drawn again as they were.
"""

from __future__ import annotations

from typing import Any

from lit_compress.models.accounting import forward_bytes
from lit_compress.models.sites import Model, blocks
from lit_compress.stages.base import Stage
from lit_compress.utils.memory import return_freed_memory


def recomputes(stage: Stage, net: Model, asked: bool) -> bool:
    """Return whether the blocks of ``net`` recompute their activations in ``stage`` if a user ``asked`` for it."""
    return asked and stage.repeatable and net.supports_gradient_checkpointing


def activations(stage: Stage, net: Model, shape: tuple[int, int], half: bool, asked: bool) -> float | None:
    """Return the bytes of activations that a forward of ``stage`` keeps; None if the model's code looks at values.

    Args:
        stage: that trains the model; some stages cannot recompute.
        net: in any form, also without values.
        shape: texts and tokens of the largest batch.
        half: whether it runs under autocast to 16 bits.
        asked: whether to recompute.
    """
    kept: float | None = forward_bytes(net, *shape, "parameters", half)
    if kept is not None and recomputes(stage, net, asked):
        count = sum(1 for _ in blocks(net))
        kept = kept / count + 4 * count * shape[0] * shape[1] * net.config.hidden_size  # and a state for each block
    return kept


def recompute(net: Model) -> None:
    """Let the blocks of ``net`` recompute their activations in training; freed memory goes back to the system."""
    return_freed_memory()
    enable: Any = getattr(net, "activation_checkpointing_enable", None)
    if enable is None:  # its former name
        enable = net.gradient_checkpointing_enable
    enable({"use_reentrant": False})
