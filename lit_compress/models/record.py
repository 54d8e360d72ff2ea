"""The record of an architecture: classes whose instances, one per family, are in architectures.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_compress.layers.deployed.adopted import SomeHeads
from lit_compress.layers.deployed.removed import Returns

Role = Literal["q", "k", "v", "qkv", "qkv_by_head", "o", "gate", "up", "gate_up", "down"]
SubLayerType = Literal["attention", "cross", "ffn"]

_FUSED: dict[str, tuple[Role, ...]] = {
    "qkv": ("q", "k", "v"),
    "qkv_by_head": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
}


def parts_of(role: str) -> tuple[str, ...]:
    """Return which matrices a Linear is: several where it is one for all of them."""
    return _FUSED.get(role, (role,))


def join_parts(role: str, parts: Sequence[Tensor], width: int) -> Tensor:
    """Return a value [out] for every output of a Linear from its matrices' values: one after the other, or by head.

    ``parts`` has one [units * width] for each of :func:`parts_of`, ``width`` is of a head.
    """
    if role != "qkv_by_head":
        return torch.cat([*parts])
    return torch.stack([part.view(-1, width) for part in parts], 1).flatten()


def split_parts(role: str, values: Tensor, width: int) -> tuple[Tensor, ...]:
    """Return the values of each matrix of a Linear, in the order of :func:`parts_of`; undoes :func:`join_parts`."""
    count = len(parts_of(role))
    if role != "qkv_by_head":
        return values.chunk(count)
    return tuple(values.view(-1, count, width)[:, i].flatten() for i in range(count))


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: transformer blocks and their embeddings; paths are relative to the base model.

    Attributes:
        blocks: path of the blocks; ``*`` stands for every index of a ModuleList.
        embeddings: paths of the embeddings; those that a model lacks are left out.
        widened_by: path of the Linear that widens the embeddings to the width of the blocks.
        norm: path of the norm of the embeddings or, in a pre-norm architecture, of the last hidden states. None if
            the directions of the residual stream cannot be projected.
    """

    blocks: str
    embeddings: tuple[str, ...] = ()
    widened_by: str | None = None
    norm: str | None = None

    @property
    def writers(self) -> tuple[str, ...]:
        """Paths of the modules that write the embeddings to the residual stream."""
        return (*self.embeddings, *([self.widened_by] if self.widened_by else ()))


@dataclass(frozen=True)
class SubLayerSpec:
    """An attention or a feed-forward network of a block; paths are relative to the block.

    Attributes:
        kind: attention, cross (a decoder's attention over the encoder's states) or ffn.
        linears: path of a Linear -> its role, in forward order; a block has some of them. ``qkv`` and ``gate_up`` are
            one Linear for several matrices in this order; in ``qkv_by_head`` every head has its own three together.
        norm: path of its norm, which is after the residual sum or, in a pre-norm architecture, before the
            sub-layer. None if the directions of the residual stream cannot be projected.
        when_removed: path of a module -> the output of its placeholder when the sub-layer is removed; None if it cannot
            be removed. Its norm is removed too, and not named again.
        module: path of the attention, whose attributes may have to be set to the number of heads left; a block that
            lacks it has no such sub-layer.
        stays: path of a module in the attention that stays when the attention is removed, in the blocks that have it.
        also: paths of further Linears whose outputs are divided into heads.
    """

    kind: SubLayerType
    linears: dict[str, Role]
    norm: str | None = None
    when_removed: dict[str, Returns] | None = None
    module: str = ""
    also: tuple[str, ...] = ()
    stays: str = ""


@dataclass(frozen=True)
class Architecture:
    """The record of one architecture.

    Attributes:
        stacks: ``encoder``, ``decoder`` -> their paths. A stack that a model does not have (the decoder of T5's encoder
            alone) is left out.
        sublayers: sub-layers of a block, in forward order; those that a block lacks are left out.
        embeddings: paths of modules, relative to the base model, whose parameters count as embeddings, besides the
            stacks' embeddings.
        pre_norm: the norms are before the sub-layers.
        rms: the norms take no mean away.
        rotary: positions turn queries and keys, so that no projection may come before.
        head_norms: the queries and keys of every head are normalised, with the epsilon of all norms and one weight for
            all heads: heads may go, but no projection may come before.
        repeated: a block runs more than once, first on an input that no block's norm has written.
        passes_on: a block hands more than hidden states on to the next one, so that none can be taken out.
        parts_returned: length of the tuple that a block returns; 0: it returns hidden states alone.
        bare_start: the first attention has no norm before it, in a pre-norm architecture.
        keeps_basis: another reason why hidden states must keep their basis, for an error.
        activation: the configuration's name of the neurons' activation.
        removes_heads: the attention finds its number of heads from the width of the projections.
        head_attributes: head width, heads left -> attributes of the attention module to set.
        shares_bias: the layer that an attention becomes that has lost heads, if the heads of all layers read one bias
            of relative positions: it knows which it has.
        cuts_stream: the width of the residual stream can be cut.
        cached: the attentions number themselves for a key-value cache.
        gated: False if sub-layers can be removed, but neither they nor their heads and neurons can have gates.
        neurons_field: the configuration's name of the number of neurons, for all blocks of a stack (``{stack}``).
        heads_fields: its names of the numbers of heads of queries and of keys, if it has the width of a head
            (``head_dim``) apart from the others. Empty: heads are as many as the width of hidden states says.
    """

    stacks: dict[str, Stack]
    sublayers: tuple[SubLayerSpec, ...]
    embeddings: tuple[str, ...] = ()
    pre_norm: bool = False
    rms: bool = False
    rotary: bool = False
    head_norms: bool = False
    repeated: bool = False
    passes_on: bool = False
    parts_returned: int = 0
    bare_start: bool = False
    keeps_basis: str = ""
    activation: str = "hidden_act"
    removes_heads: bool = False
    head_attributes: Callable[[int, int], dict[str, int]] | None = None
    shares_bias: type[SomeHeads] | None = None
    cuts_stream: bool = False
    cached: bool = False
    gated: bool = True
    neurons_field: str | None = "intermediate_size"
    heads_fields: tuple[str, ...] = ()

    @property
    def cuts_heads(self) -> bool:
        """Whether an attention can have fewer heads."""
        return self.removes_heads or bool(self.shares_bias or self.head_attributes)

    @property
    def has_removable_sublayers(self) -> bool:
        """Whether sub-layers can be gated and removed."""
        return self.gated and self.removes_sublayers

    @property
    def removes_sublayers(self) -> bool:
        """Whether sub-layers can be removed."""
        return all(spec.when_removed is not None for spec in self.sublayers)

    @property
    def has_residual_stream(self) -> bool:
        """Whether the directions of the residual stream, of heads or of neurons can be projected."""
        return all(stack.norm is not None for stack in self.stacks.values())
