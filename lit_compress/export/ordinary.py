"""Exports that are ordinary models of their family: the library's own class holds them, with other sizes at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lit_compress.export.narrow import as_ordinary
from lit_compress.models.own_code import file_of
from lit_compress.models.shapes import empty_parameters
from lit_compress.models.surgery import as_linears, replace
from lit_compress.models.uniform_shape import ordinary_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def ordinary_form(net: PreTrainedModel) -> PreTrainedModel | None:
    """Return the ordinary model whose layers have the sizes of the fused ``net``, its parameters without values.

    None if the library's own class has no such model, or it is not of the library; only shapes are read.
    """
    if file_of(net) or (config := ordinary_config(net)) is None:
        return None
    with empty_parameters():
        ordinary = as_linears(type(net)(config))
        ordinary.tie_weights()
    if net.can_generate():
        ordinary.generation_config = net.generation_config
    return ordinary.eval()


@torch.no_grad()
def ordinary_net(net: PreTrainedModel) -> PreTrainedModel | None:
    """Return the ordinary model that the fused ``net`` is; None for any other.

    It is one where no matrix was replaced, where all layers have as many heads and as many neurons (uniform_shape.py),
    or where all blocks share one basis of narrow hidden states (narrow.py).
    """
    if (ordinary := ordinary_form(net)) is None:
        return None if file_of(net) else as_ordinary(net)
    hand_over(net, ordinary)
    ordinary.tie_weights()
    for name, buffer in ordinary.named_buffers():  # of fewer kinds of blocks than there were, fewer
        buffer.copy_(net.get_buffer(name))
    return ordinary


def hand_over(module: nn.Module, ordinary: nn.Module) -> None:
    """Give the parameters of an ordinary module the values of those with the same names."""
    own = dict(module.named_parameters())
    for name, _ in list(ordinary.named_parameters()):
        replace(ordinary, name, nn.Parameter(own[name].detach()))
