"""Recomputation: blocks forget their activations and compute them again in the backward, if a batch has too many.

Chen, Xu, Zhang, Guestrin 2016, "Training Deep Models with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174. One
hidden state per block stays, and the activations of one block at a time. A step takes about a third more time, and its
gradients are the same. Random numbers are drawn again as they were.
"""

from __future__ import annotations

from typing import Any

import torch

from lit_compress.models.accounting import forward_bytes
from lit_compress.models.sites import Model, blocks
from lit_compress.stages.base import Stage
from lit_compress.utils.devices import free_bytes
from lit_compress.utils.memory import return_freed_memory

MOST = 4 * 2**30  # bytes of the activations of a forward that a CPU keeps
MOST_OF_LANGUAGE_MODELS = 2**30  # their losses over a vocabulary, and its gradient, take memory of their own
MOST_WIDTHS = 100  # more numbers than a block keeps of a token and of each of its dimensions


def most_kept(device: torch.device, over_vocabulary: bool) -> float:
    """Return how many bytes of activations a forward keeps: on an accelerator half of the memory that is free."""
    if device.type == "cpu":
        return MOST_OF_LANGUAGE_MODELS if over_vocabulary else MOST
    return free_bytes(device) / 2


def activations(
    stage: Stage, net: Model, shape: tuple[int, int], half: bool, asked: bool | None, most: float
) -> tuple[float | None, bool]:
    """Return the bytes of activations that a forward of ``stage`` keeps, and whether its blocks recompute them.

    Args:
        stage: that trains the model; some stages cannot recompute.
        net: in any form, also without values.
        shape: texts and tokens of the largest batch.
        half: whether it runs under autocast to 16 bits.
        asked: whether to recompute; None: if they are more than ``most`` bytes.

    Returns:
        Bytes, None if the model's code looks at values; and the decision.
    """
    kept: float | None = forward_bytes(net, *shape, "parameters", half)
    again = (kept is not None and kept > most) if asked is None else asked
    again = again and stage.repeatable and net.supports_gradient_checkpointing
    if again and kept is not None:
        count = sum(1 for _ in blocks(net))
        kept = kept / count + 4 * count * shape[0] * shape[1] * net.config.hidden_size  # and a state for each block
    return kept, again


def surely_few(net: Model, shape: tuple[int, int], most: float) -> bool:
    """Return whether a forward keeps at most ``most`` bytes, without running it."""
    count = sum(1 for _ in blocks(net))
    return 4 * MOST_WIDTHS * count * shape[0] * shape[1] * net.config.hidden_size <= most


def recompute(net: Model) -> None:
    """Let the blocks of ``net`` recompute their activations in training; freed memory goes back to the system."""
    return_freed_memory()
    enable: Any = getattr(net, "activation_checkpointing_enable", None)
    if enable is None:  # its former name
        enable = net.gradient_checkpointing_enable
    enable({"use_reentrant": False})
