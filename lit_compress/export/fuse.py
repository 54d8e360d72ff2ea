"""The model of an export: each layer is the cheapest one with the same outputs; fewer rows and bits as asked."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.data.datamodule import DataModule
from lit_compress.export.choices import Choices
from lit_compress.export.runtimes import Dtype
from lit_compress.export.vocabulary import cut_rows, cut_vocabulary, shrink_table
from lit_compress.layers import LAYER_TYPES, SizedLinear
from lit_compress.models.accounting import dense_layers
from lit_compress.models.cut import remove_constant_units
from lit_compress.models.sites import Model
from lit_compress.models.surgery import link, replace, with_same_parameters
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError


def fuse(net: Model) -> Model:
    """Return a copy of ``net`` that stores only the kept values, with the same outputs in evaluation mode.

    Units with constant outputs are removed, and every layer is the smallest one. Other parameters are shared.
    """
    small = with_same_parameters(net)
    remove_constant_units(small)
    dense = dense_layers(small)
    for name, module in list(small.named_modules()):
        if isinstance(module, LAYER_TYPES):
            smallest = module.fuse() if hasattr(module, "fuse") else module
            whole = isinstance(smallest, nn.Linear) and not isinstance(smallest, SizedLinear)
            if whole and smallest.weight.numel() != dense[name].weight.numel():
                smallest = SizedLinear.from_tensors(smallest.weight, smallest.bias)
            replace(small, name, smallest)
    return link(small).eval()


def shrink(net: Model, data: DataModule, choices: Choices) -> tuple[Model, DataModule, dict[str, Any]]:
    """Return the fused ``net`` and ``data`` with the rows and bits of the choices, and the report's entries on them.

    The entries are ``vocabulary`` and ``embeddings``, None without the choice. The table and the dtype change in place.

    Raises:
        UserError: the tokenizer or the model cannot be cut, or not be stored so.
    """
    vocabulary, embeddings = None, None
    if choices.vocabulary == "data":
        net, data, vocabulary = cut_vocabulary(net, data)
    if choices.embeddings:
        before = sum(p.nbytes for p in net.get_input_embeddings().parameters())
        embeddings = {"form": "int8", "of": before, "error": float(shrink_table(net))}
    if choices.half:
        cast(net, choices.dtype)
    if embeddings:
        embeddings["bytes"] = sum(p.nbytes for p in net.get_input_embeddings().parameters())
    return net, data, {"vocabulary": vocabulary, "embeddings": embeddings}


def cast(net: Model, dtype: Dtype) -> None:
    """Cast the floating-point weights of ``net``, which get new parameters, and name the dtype in its configuration.

    Raises:
        UserError: a weight is too large.
    """
    kind = getattr(torch, dtype)
    net.config.dtype = kind
    new = {}
    for name, value in net.named_parameters():
        new[value] = nn.Parameter(in_dtype(name, value.detach(), kind)) if value.is_floating_point() else value
    for module in net.modules():  # some tensors have several owners
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[value])
    net.to(kind)  # buffers


def in_dtype(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in ``dtype``, and any other as it is.

    Raises:
        UserError: ``dtype`` cannot hold its values.
    """
    if not value.is_floating_point():
        return value
    if not all_finite(cast := value.to(dtype)):
        raise UserError(f"export: --dtype {str(dtype)[6:]} cannot hold the values of '{name}'; nearest: bfloat16")
    return cast


def outline_export(net: Model, choices: Choices, tokens_left: int | None = None) -> Model:
    """Return a copy of ``net``, without values, in the shapes and dtypes of the file that ``write_export`` writes.

    ``tokens_left`` is the number of rows that ``vocabulary data`` keeps.

    Raises:
        UserError: ``net`` cannot have these choices.
    """
    small = fuse(net)
    if tokens_left is not None:
        cut_rows(small, range(tokens_left))
    if choices.embeddings:
        shrink_table(small)
    return move(copy.deepcopy(small), getattr(torch, choices.dtype)) if choices.half else small  # not the shared values
