"""Nets without values, for what only needs names and shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def without_values(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the net that ``build`` makes, with weights that have shapes but neither values nor memory.

    Their random initialization is left out: on the device ``meta`` it has no effect, but takes most of the time.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        net = build()
    net.tie_weights()  # which the initialization does
    return net


def with_zeros(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a net without values, on the CPU: its parameters are 0, its buffers those of a new net."""
    from transformers.initialization import no_init_weights

    whole = copy.deepcopy(net).to_empty(device="cpu")
    with no_init_weights():
        fresh = dict(type(net)(net.config).named_buffers())
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
        for name, buffer in whole.named_buffers():
            buffer.copy_(fresh[name]) if name in fresh else buffer.zero_()
    return whole
