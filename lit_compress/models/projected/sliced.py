"""Slices of the residual stream: every site keeps the first directions of a basis of its own (SliceGPT)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_compress.models.projected.fold import fold_projections
from lit_compress.models.projected.gates import GateSlots, ProjectionSpec
from lit_compress.models.projected.insert import identity_bases, insert_projections
from lit_compress.models.surgery import link

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLICED = ProjectionSpec(("hidden",), heads="block")  # bases of hidden states alone, one for every sub-layer


def whole_axes(axes: Tensor) -> Tensor:
    """Return U [d, d] of the first axes [d, k]; the directions that go are 0."""
    return nn.functional.pad(axes, (0, len(axes) - axes.shape[1]))


def slice_stream(net: PreTrainedModel, axes: list[Tensor], widths: list[int]) -> PreTrainedModel:
    """Give hidden states their bases ``axes``, U [d, d] of every site, and keep the first directions, in place.

    Args:
        net: dense, on the CPU.
        axes: one per site of the residual stream.
        widths: number of directions that every site keeps.
    """
    insert_projections(net, replace(identity_bases(net), sites=axes), SLICED)
    z = torch.arange(net.config.hidden_size) < torch.tensor(widths)[:, None]
    GateSlots(net, SLICED).set({"hidden": z.to(net.dtype)})
    return link(fold_projections(net))  # as a checkpoint rebuilds it
