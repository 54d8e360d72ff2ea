"""Functions that find the sites, sub-layers and embeddings of a model by the record of its architecture.

A site is a Linear that a method may compress. A sub-layer is an attention or a feed-forward network that can be removed
as a whole. Their paths are in architectures.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, Literal, TypeVar

from torch import nn

from lit_compress.layers.deployed.removed import Removed, Returns
from lit_compress.models.architectures import families_with, get_architecture
from lit_compress.models.record import Architecture, Role, SubLayerType, parts_of
from lit_compress.utils.errors import UserError
from lit_compress.utils.types import Model

Module = TypeVar("Module", bound=nn.Module)
Part = TypeVar("Part", bound="SubLayer")
SITES = "found_sites"  # attribute of a model that was searched


@dataclass(frozen=True)
class Site:
    """A named matrix of a transformer block that a method may compress.

    Attributes:
        name: full name in the model.
        role: q, k, v, o (attention), up, down (feed-forward), gate (the activated one of two first matrices); qkv and
            gate_up where one Linear is several of them.
        layer: index of the block in its stack.
        stack: ``encoder`` or ``decoder``.
        cross: True in a decoder's attention over the encoder's states, which k and v read.
    """

    name: str
    role: Role
    layer: int
    stack: str
    cross: bool = False


@dataclass(frozen=True)
class SubLayer:
    """A sub-layer of a model that can be removed; names are full names in the model.

    Attributes:
        kind: ``attention`` (also over the encoder's states) or ``ffn``.
        type: ``attention``, ``cross`` for one over the encoder's states, or ``ffn``.
        layer: index of its block, over all stacks.
        stack: ``encoder`` or ``decoder``.
        block: name of the block.
        sites: role -> name of the Linear.
        also, module: names, as in :class:`~lit_compress.models.record.SubLayerSpec`.
        norm: name of the norm after the residual sum, which is removed with the sub-layer; None in pre-norm models.
        stubs: name of a module -> the output of its placeholder when the sub-layer is removed.
        heads: number of heads in the dense model (1 for a feed-forward network); with grouped queries the heads of
            keys.
        width: of a head; 0 in a feed-forward network.
        cached: True if the attention is numbered for the cache of a decoder's keys and values.
    """

    kind: Literal["attention", "ffn"]
    type: SubLayerType
    layer: int
    stack: str
    block: str
    sites: dict[str, str]
    also: tuple[str, ...]
    norm: str | None
    module: str
    stubs: dict[str, Returns]
    heads: int
    width: int
    cached: bool

    @property
    def last(self) -> str:
        """Name of the Linear that reads the heads or neurons."""
        return self.sites["o" if self.kind == "attention" else "down"]

    @property
    def values(self) -> str:
        """Role of the Linear of an attention with the values of its heads, the last of the matrices in it."""
        return next(role for role in self.sites if "v" in parts_of(role))

    def count(self, net: nn.Module) -> int:
        """Return the number of heads (with grouped queries of keys) or neurons in ``net``."""
        return self.heads if self.kind == "attention" else size_at(net, self.last)[1]

    def weights(self, net: nn.Module) -> int:
        """Return the number of weights in all matrices in ``net``."""
        return sum(prod(size_at(net, name)) for name in self.sites.values())

    def price(self, net: nn.Module) -> int:
        """Return the number of weights of one head, with grouped queries with its queries, or one neuron."""
        return self.weights(net) // self.count(net)


def module_at(net: nn.Module, name: str, kind: type[Module]) -> Module:
    """Return the module ``name`` of ``net``, which is a ``kind``."""
    module = net.get_submodule(name)
    assert isinstance(module, kind), f"{name} is {type(module).__name__}"
    return module


def size_at(net: nn.Module, name: str) -> tuple[int, int]:
    """Return (out, in) of the Linear ``name`` of ``net`` or the layer in its place, (width, rows) of a table."""
    layer: Any = net.get_submodule(name)
    if hasattr(layer, "num_embeddings"):
        return layer.embedding_dim, layer.num_embeddings
    return layer.out_features, layer.in_features


def has(net: nn.Module, name: str) -> bool:
    """Return whether ``net`` has a submodule ``name``, or the placeholder of one that was removed."""
    module: Any = net
    for part in name.split("."):
        module = getattr(module, part, None)
    return isinstance(module, nn.Module)


def _is_there(module: Any, path: str) -> bool | None:
    """Return whether ``module`` has a module at ``path``; None if it, or one that contains it, was removed."""
    for part in path.split("."):
        if isinstance(module := getattr(module, part, None), Removed):
            return None
    return isinstance(module, nn.Module)


def base_prefix(net: Model) -> str:
    """Return the name of the base model inside ``net`` with its dot, or "" if ``net`` is the base model."""
    return "" if net.base_model is net else f"{net.base_model_prefix}."


def gives_states(net: Model) -> bool:
    """Return whether ``net`` has no head: its last hidden states are the outputs, whose width and basis must stay."""
    return net.base_model is net and not net.config.is_encoder_decoder


def blocks(net: Model) -> Iterator[tuple[str, int, str, nn.Module]]:
    """Yield (stack, layer, full name, module) of every transformer block."""
    prefix = base_prefix(net)
    for name, stack in get_architecture(net).stacks.items():
        if not hasattr(net.base_model, stack.blocks.partition(".")[0]):
            continue
        for layer, (path, block) in enumerate(_matches(net.base_model, stack.blocks)):
            yield name, layer, f"{prefix}{path}", block


def _matches(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of every submodule that matches ``pattern``, in order."""
    before, star, after = pattern.partition(".*")
    if not star:
        yield before, module.get_submodule(before)
    for i in range(len(module_at(module, before, nn.ModuleList)) if star else 0):
        yield from _matches(module, f"{before}.{i}{after}")


def find_sites(net: Model) -> list[Site]:
    """Return every site of ``net`` in forward order, also where the Linear was replaced, without removed sub-layers.

    They are searched once and kept with the model and its copies: a site may be removed, and none is ever added.

    Raises:
        UserError: the architecture has no record.
    """
    if SITES not in vars(net):
        vars(net)[SITES] = search_sites(net)
    return [site for site in vars(net)[SITES] if _is_there(net, site.name)]


def search_sites(net: Model) -> list[Site]:
    """Search the blocks for :func:`find_sites`."""
    specs = get_architecture(net).sublayers
    linears = {path: (role, spec.kind == "cross") for spec in specs for path, role in spec.linears.items()}
    sites = []
    for stack, layer, name, block in blocks(net):
        own = {path: here for path in linears if (here := _is_there(block, path)) is not False}
        roles = {part for path in own for part in parts_of(linears[path][0])}
        assert {"q", "k", "v", "o", "up", "down"} <= roles, f"{name} has only {list(own)}"
        left = (path for path, here in own.items() if here)
        sites += [Site(f"{name}.{path}", linears[path][0], layer, stack, linears[path][1]) for path in left]
    return sites


def site_shapes(net: Model) -> dict[str, tuple[int, int]]:
    """Return {site: (out, in)} of every matrix of the blocks, as if all were dense."""
    return {site.name: size_at(net, site.name) for site in find_sites(net)}


def shared_inputs(net: Model) -> list[tuple[str, ...]]:
    """Return the names of the sites of ``net`` in groups that read the same input, in forward order.

    These are q, k and v of an attention, k and v of one over the encoder's states, gate and up; other sites are groups
    of one. DeBERTa's q and k also read the relative positions, v does not.
    """
    relative = getattr(net.config, "relative_attention", False)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for site in find_sites(net):
        first = {"k": "k" if site.cross else "q", "v": "v" if relative else "k" if site.cross else "q", "up": "gate"}
        key = (site.stack, site.layer, site.cross, first.get(site.role, site.role))
        groups.setdefault(key, []).append(site.name)
    return [tuple(group) for group in groups.values()]


def stacks(net: Model) -> dict[str, tuple[str, ...]]:
    """Return {first site: names of all sites} of the Linears that can be stacked on one right factor.

    They read the same input in every forward; see :func:`shared_inputs`.
    """
    shared = (group for group in shared_inputs(net) if len(group) > 1)
    groups = [group for group in shared if all(isinstance(net.get_submodule(name), nn.Linear) for name in group)]
    return {group[0]: group for group in groups}


def head_width(net: Model, stack: str) -> int:
    """Return the width of an attention head of ``stack`` from the configuration."""
    return getattr(net.config, "head_dim", None) or net.config.hidden_size // _heads(net, stack)


def _heads(net: Model, stack: str) -> int:
    return getattr(net.config, f"{stack}_attention_heads", net.config.num_attention_heads)


def embedding_params(net: Model) -> list[nn.Parameter]:
    """Return the parameters of the embeddings of ``net``."""
    architecture = get_architecture(net)
    paths = (*architecture.embeddings, *(path for stack in architecture.stacks.values() for path in stack.embeddings))
    starts = tuple(f"{path}." for path in paths)
    return [p for name, p in net.base_model.named_parameters() if name.startswith(starts)]


def get_removable(net: Model, gated: bool = True) -> Architecture:
    """Return the record of ``net``; a UserError if its sub-layers cannot be ``gated``, or cannot be removed."""
    architecture, name = get_architecture(net), net.config.model_type
    capability, done = ("has_removable_sublayers", "gated") if gated else ("removes_sublayers", "removed")
    if not getattr(architecture, capability):
        able = families_with(attrgetter(capability))
        why = " (one block runs in all layers, so they have one shape)" if architecture.repeated else ""
        raise UserError(f"model.backbone: sub-layers of '{name}' cannot be {done}{why}; those of {able} can")
    if not getattr(net.config, "do_layer_norm_before", True):
        raise UserError(f"model.backbone: an OPT with do_layer_norm_before False (350m) cannot be {done}; others can")
    if architecture.cached and len(set(getattr(net.config, "layer_types", None) or ())) > 1:  # so has the cache
        raise UserError(f"model.backbone: sub-layers of this '{name}' cannot be removed: its blocks attend differently")
    return architecture


def sublayers(net: Model, removable: bool = True, gated: bool = True) -> list[SubLayer]:
    """Return attentions and feed-forward networks of ``net`` in forward order, those already removed included.

    ``removable`` is whether they will be removed as a whole. False: heads and neurons of them at most, in any family;
    then those already removed are left out. ``gated`` is whether removable ones may have gates or lose units before.

    Raises:
        UserError: sub-layers of its architecture cannot be removed, and shall be.
    """
    architecture = get_removable(net, gated) if removable else get_architecture(net)
    keys = getattr(net.config, "num_key_value_heads", None)
    parts = []
    for number, (stack, _, block, module) in enumerate(blocks(net)):
        for spec in architecture.sublayers:
            if spec.module and not has(net, f"{block}.{spec.module}"):
                continue
            stubs = {f"{block}.{path}": returns for path, returns in (spec.when_removed or {}).items()}
            if spec.stays and has(net, f"{block}.{spec.stays}"):  # its matrices are removed, and it stays
                del stubs[f"{block}.{spec.module}"]
                stubs |= {f"{block}.{path}": "zero" for path in spec.linears}
            there = {path: _is_there(module, path) for path in spec.linears}  # None: it was removed
            paths = {p: role for p, role in spec.linears.items() if there[p] or (removable and there[p] is None)}
            if not paths:
                continue
            norm = f"{block}.{spec.norm}" if spec.norm and not architecture.pre_norm else None
            if spec.norm:  # also one before it, which nothing else reads: DDP refuses parameters without gradients
                stubs[f"{block}.{spec.norm}"] = "input"
            parts.append(
                SubLayer(
                    kind="ffn" if spec.kind == "ffn" else "attention",
                    type=spec.kind,
                    layer=number,
                    stack=stack,
                    block=block,
                    sites={role: f"{block}.{path}" for path, role in paths.items()},
                    also=tuple(f"{block}.{path}" for path in spec.also),
                    norm=norm,
                    module=f"{block}.{spec.module}",
                    stubs=stubs,
                    heads=1 if spec.kind == "ffn" else keys or _heads(net, stack),
                    width=0 if spec.kind == "ffn" else head_width(net, stack),
                    cached=architecture.cached and stack == "decoder" and spec.kind == "attention",
                )
            )
    return parts


def is_removed(net: Model, part: SubLayer) -> bool:
    """Return whether a sub-layer was removed as a whole."""
    return _is_there(net, part.last) is None


def cuttable(net: Model, whole: bool = False) -> list[SubLayer]:
    """Return the sub-layers of ``net`` that can lose heads or neurons, in forward order, without those removed.

    With ``whole``, they can also be removed, and those already removed are included.
    """
    heads = get_architecture(net).cuts_heads
    return [part for part in sublayers(net, removable=whole, gated=False) if heads or part.kind == "ffn"]


def held_part(parts: list[SubLayer]) -> SubLayer | None:
    """Return the sub-layer that keeps one unit: a decoder's first self-attention, by which its cache counts tokens."""
    return next((part for part in parts if part.cached), None)


def of_kind(parts: list[Part], kind: str) -> list[Part]:
    """Return the attentions or the feed-forward networks, in order; a gate has a group for each."""
    return [part for part in parts if part.kind == kind]
