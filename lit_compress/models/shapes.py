"""Models without values, for code that only needs names and shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def without_values(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that ``build`` makes, with weights that have shapes but neither values nor memory.

    Their random initialization is left out: on the device ``meta`` it has no effect, but takes most of the time.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        net = build()
    net.tie_weights()  # which the initialization does
    return net


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Give the modules that are built in this context parameters that have shapes, but neither values nor memory.

    Buffers are as usual, unlike under the device ``meta``: once parameters are loaded, the module is whole. The sizes
    of a file can so be compared before they are allocated.
    """
    from transformers.initialization import no_init_weights

    def empty(module: nn.Module, name: str, value: nn.Parameter) -> Any:  # torch's annotation is None
        if value.is_meta:
            return None  # stays unchanged, so that tied parameters stay one
        return nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)

    hook = nn.modules.module.register_module_parameter_registration_hook(empty)
    try:
        with no_init_weights():
            yield
    finally:
        hook.remove()


def with_zeros(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model without values, on the CPU: its parameters are 0, its buffers a new model's."""
    from transformers.initialization import no_init_weights

    whole = copy.deepcopy(net).to_empty(device="cpu")
    with torch.no_grad(), no_init_weights():
        fresh = dict(type(net)(net.config).named_buffers())
        for value in whole.parameters():
            value.zero_()
        for name, buffer in whole.named_buffers():
            buffer.copy_(fresh[name]) if name in fresh else buffer.zero_()
    return whole


def with_random_values(net: PreTrainedModel) -> PreTrainedModel:
    """Return ``net``, or, if it has no values, a copy on the CPU whose parameters are small random numbers."""
    if not any(parameter.is_meta for parameter in net.parameters()):
        return net
    whole, generator = with_zeros(net).eval(), torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        if parameter.is_floating_point():
            parameter.data.normal_(0.0, 0.02, generator=generator)
    return whole
