"""Slices of the residual stream: every site keeps the first directions of a basis of its own (SliceGPT).

A model with one block at a time in memory is sliced block by block, each in a small model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.models.block_net import BlockNet
from lit_compress.models.projected.bases import identity_bases
from lit_compress.models.projected.fold import fold_projections
from lit_compress.models.projected.gates import GateSlots, ProjectionSpec
from lit_compress.models.projected.insert import insert_projections
from lit_compress.models.record import parts_of
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.shorten import shorten, stack_lengths
from lit_compress.models.sites import blocks
from lit_compress.models.surgery import Structure, describe, link
from lit_compress.models.surgery import replace as replace_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLICED = ProjectionSpec(("hidden",), heads="block")  # bases of hidden states alone, one for every sub-layer
ROWS = 1024  # of a table, that are multiplied at once


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


def sliced_block(
    net: BlockNet, shapes: PreTrainedModel, number: int, axes: list[Tensor], widths: list[int]
) -> tuple[dict[str, Tensor], Structure]:
    """Slice one block; return its tensors, by their names in the model, and the specs of its modules.

    The first block brings the tables of embeddings, the last one the Linear that reads the last hidden states.

    Args:
        net: gives the values of the dense model, whose norms are before the sub-layers.
        shapes: the dense model without values.
        number: of the block.
        axes: U [d, d] of the sites of this block and the next one, to whose first basis it writes.
        widths: number of directions that these sites keep.
    """
    first, last = number == 0, number + 1 == len(net)
    with net.only_block():
        small = _alone(net, shapes, number, last)
        stream, (own, *others) = residual_stream(small), [name for *_, name, _ in blocks(small)]
        slice_stream(small, axes, widths)
    tables = stream.sites[0].tables
    for name in (*(tables if first else ()), *([stream.reader] if last else ())):
        _multiply(small.get_submodule(name), net.net.get_submodule(name))

    def renamed(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        tensors = {}
        for name, value in items:
            if f"{name}.".startswith(f"{own}."):
                tensors[net.names[number] + name.removeprefix(own)] = value
            elif not f"{name}.".startswith(tuple(f"{other}." for other in others)) and (
                first if name.startswith(tuple(tables)) else last
            ):
                tensors[name] = value
        return tensors

    return renamed(small.state_dict().items()), renamed(describe(small).items())


def _alone(net: BlockNet, shapes: PreTrainedModel, number: int, last: bool) -> PreTrainedModel:
    """Return a block in a model of its own, and in the place of the next one a block of zeros.

    Tables and the last Linear are identities: slices leave of them the matrix that theirs are to be multiplied by.
    """
    small, size = copy.deepcopy(shapes), int(shapes.config.hidden_size)
    shorten(small, dict.fromkeys(stack_lengths(small), range(1 if last else 2)))
    stream, (own, *_) = residual_stream(small), [name for *_, name, _ in blocks(small)]
    end = stream.sites[-1].norms[-1]
    net.fill(number, small.get_submodule(own))
    for sublayer in stream.networks[1:]:  # one neuron is enough
        for role, name in sublayer.linears.items():
            sizes = (1, size) if role == sublayer.last else (size, len(parts_of(role)))
            replace_module(small, name, nn.Linear(*sizes, bias=small.get_submodule(name).bias is not None))
    for name in (*stream.sites[0].tables, stream.reader):
        small.get_submodule(name).weight = nn.Parameter(torch.eye(size))
    for module_name, module in small.named_modules():
        for key, value in list(module.named_parameters(recurse=False)):
            if module_name == end:
                setattr(module, key, nn.Parameter(net.read(f"{end}.{key}")))
            elif value.is_meta:
                shape = (size,) if module_name == stream.reader else value.shape
                setattr(module, key, nn.Parameter(torch.zeros(shape)))
    return small


def _multiply(module: nn.Module, dense: nn.Module) -> None:
    """Multiply the weight of ``dense`` by ``module``'s, the matrix after a table or Linear; add up biases."""
    weight = dense.get_parameter("weight").detach().cpu()
    right, moved = module.get_parameter("weight").detach().double(), getattr(module, "bias", None)
    if moved is not None:
        bias = torch.cat([rows.double() @ moved.detach().double() for rows in weight.split(ROWS)])
        own = getattr(dense, "bias", None)
        module.bias = nn.Parameter((bias if own is None else bias + own.detach().cpu()).to(weight.dtype))
    module.weight = nn.Parameter(torch.cat([(rows.double() @ right).to(weight.dtype) for rows in weight.split(ROWS)]))
    for size in ("num_embeddings", "out_features"):
        if hasattr(module, size):
            setattr(module, size, len(weight))
