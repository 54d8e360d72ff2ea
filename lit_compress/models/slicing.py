"""Smaller Linears: some rows and columns of a Linear or of the layer in its place.

The Hugging Face code needs no change for this. The new sizes travel in the layers' specs (surgery.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.layers import LAYERS, SizedLinear
from lit_compress.models.surgery import fill

# tensors of a layer that have a row for every output, a column for every input
OUTPUTS, INPUTS = ("weight", "left", "sparse", "bias"), ("weight", "right", "sparse")


@torch.no_grad()
def slice_linear(linear: Any, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Module:
    """Return a layer of the same kind with only some outputs and inputs of ``linear``; for a Linear a SizedLinear.

    Args:
        linear: a Linear or its training layer.
        rows: bool [out], the outputs to keep; None for all.
        columns: bool [in], the inputs to keep; None for all.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in linear.named_parameters(recurse=False):
        if rows is not None and name in OUTPUTS:
            tensor = tensor[rows]
        if columns is not None and name in INPUTS:
            tensor = tensor[:, columns]
        tensors[name] = tensor
    if isinstance(linear, nn.Linear):
        return SizedLinear.from_tensors(tensors["weight"], tensors.get("bias"))
    spec = linear.spec()
    kind = LAYERS[spec.pop("kind")]
    if rows is not None:
        spec["out_features"] = int(rows.sum())
    if columns is not None:
        spec["in_features"] = int(columns.sum())
    layer = kind(**spec)
    fill(layer, **tensors)
    return layer


@torch.no_grad()
def add_constant(linear: Any, columns: Tensor, value: Tensor) -> None:
    """Add to the bias of ``linear`` its outputs for the inputs ``columns`` (bool [in]) at constant ``value``."""
    if linear.bias is None and not value.any():
        return
    x = value.new_zeros(len(columns))
    x[columns] = value
    linear.bias = nn.Parameter(linear(x))
