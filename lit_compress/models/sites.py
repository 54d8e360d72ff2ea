"""Functions that find the sites, sub-layers and embeddings of a model by the record of its architecture.

A site is a Linear that a method may compress. A sub-layer is an attention or a feed-forward network that can be removed
as a whole. Their paths are in architectures.py. In transformers 5 BERT, RoBERTa, ELECTRA and DistilBERT compute the
number of heads from the width of the projections; OPT and DeBERTa have it as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

from lit_compress.layers.deployed.removed import Removed, Returns
from lit_compress.layers.deployed.sized_stream import SizedEmbedding
from lit_compress.models.architectures import families_with, get_architecture
from lit_compress.models.pattern import named_linears
from lit_compress.models.record import Architecture, Role, parts_of
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Site:
    """A named matrix of a transformer block that a method may compress.

    Attributes:
        name: full name in the model, as ``net.get_submodule`` takes it.
        role: q, k, v, o (attention), up, down (feed-forward), gate (the activated one of two first matrices); qkv and
            gate_up where one Linear is several of them; its path in the block where a pattern names the sites.
        layer: index of the block in its stack.
        stack: ``encoder`` or ``decoder``.
        cross: True in a decoder's attention over the encoder's states, which k and v read.
    """

    name: str
    role: Role | str
    layer: int
    stack: str
    cross: bool = False


@dataclass(frozen=True)
class SubLayer:
    """A sub-layer of a model that can be removed; names are full names in the model.

    Attributes:
        kind: ``attention`` (also over the encoder's states) or ``ffn``.
        layer: index of its block, over all stacks.
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
    layer: int
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


# ------------------------------------------------------------------------------------------------ modules by name


def module_at(net: nn.Module, name: str, kind: type[Module]) -> Module:
    """Return the module ``name`` of ``net``, which is a ``kind``."""
    module = net.get_submodule(name)
    assert isinstance(module, kind), f"{name} is {type(module).__name__}"
    return module


def linear_at(net: nn.Module, name: str) -> nn.Linear:
    """Return the Linear ``name`` of ``net``, or the smaller one in its place."""
    linear = net.get_submodule(name)
    assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
    return linear


def size_at(net: nn.Module, name: str) -> tuple[int, int]:
    """Return (out, in) of the Linear ``name`` of ``net`` or the layer in its place, (width, rows) of a table."""
    layer: Any = net.get_submodule(name)
    if hasattr(layer, "num_embeddings"):
        return layer.embedding_dim, layer.num_embeddings
    return layer.out_features, layer.in_features


# ------------------------------------------------------------------------------------------------ blocks and sites


def base_prefix(net: PreTrainedModel) -> str:
    """Return the name of the base model inside ``net`` with its dot, or "" if ``net`` is the base model."""
    return "" if net.base_model is net else f"{net.base_model_prefix}."


def gives_states(net: PreTrainedModel) -> bool:
    """Return whether ``net`` has no head: its last hidden states are the outputs, whose width and basis must stay."""
    return net.base_model is net and not net.config.is_encoder_decoder


def blocks(net: PreTrainedModel) -> Iterator[tuple[str, int, str, nn.Module]]:
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
        return
    for i in range(len(module_at(module, before, nn.ModuleList))):
        yield from _matches(module, f"{before}.{i}{after}")


def find_sites(net: PreTrainedModel) -> list[Site]:
    """Return every site of ``net`` in forward order, also where the Linear was replaced.

    Sites of removed sub-layers are left out.

    Raises:
        UserError: the architecture has no record, and no pattern names the sites.
    """
    if not (specs := get_architecture(net).sublayers):
        return [Site(*fields) for fields in named_linears(net)]
    linears = {path: (role, spec.kind == "cross") for spec in specs for path, role in spec.linears.items()}
    sites = []
    for stack, layer, name, block in blocks(net):
        inside = {path for path, _ in block.named_modules()}
        gone = {path for path in linears if _taken_out(block, path)}
        own = {path: linear for path, linear in linears.items() if path in inside | gone}
        roles = {part for role, _ in own.values() for part in parts_of(role)}
        assert {"q", "k", "v", "o", "up", "down"} <= roles, f"{name} has only {list(own)}"
        sites += [
            Site(f"{name}.{path}", role, layer, stack, cross)
            for path, (role, cross) in own.items()
            if path not in gone
        ]  # fmt: skip
    return sites


def site_shapes(net: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return {site: (out, in)} of every matrix of the blocks, as if all were dense."""
    return {site.name: size_at(net, site.name) for site in find_sites(net)}


def tokens_read(net: PreTrainedModel, length: int) -> dict[str, int]:
    """Return how many tokens every site reads in a forward of one text of ``length`` tokens.

    A decoder over an encoder's states is taken to write a quarter as many, as for the FLOPs of the report.
    """
    written = max(1, length // 4) if net.config.is_encoder_decoder else length
    tokens = {}
    for site in find_sites(net):
        of_encoder = site.stack == "encoder" or (site.cross and site.role in ("k", "v"))
        tokens[site.name] = length if of_encoder else written
    return tokens


def shared_inputs(net: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the names of the sites of ``net`` in groups that read the same input, in forward order.

    These are q, k and v of an attention, k and v of one over the encoder's states, gate and up; other sites are groups
    of one. DeBERTa's q and k also read the relative positions, v does not.
    """
    if not get_architecture(net).sublayers:  # names do not say it
        return [(site.name,) for site in find_sites(net)]
    relative = getattr(net.config, "relative_attention", False)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for site in find_sites(net):
        first = {"k": "k" if site.cross else "q", "v": "v" if relative else "k" if site.cross else "q", "up": "gate"}
        key = (site.stack, site.layer, site.cross, first.get(site.role, site.role))
        groups.setdefault(key, []).append(site.name)
    return [tuple(group) for group in groups.values()]


def stacks(net: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Return {first site: names of all sites} of the Linears that can be stacked on one right factor.

    They read the same input in every forward; see :func:`shared_inputs`.
    """
    shared = (group for group in shared_inputs(net) if len(group) > 1)
    groups = [group for group in shared if all(isinstance(net.get_submodule(name), nn.Linear) for name in group)]
    return {group[0]: group for group in groups}


def _taken_out(block: nn.Module, path: str) -> bool:
    """Return whether the module at ``path``, or one that contains it, was removed."""
    module: nn.Module | None = block
    for part in path.split("."):
        module = getattr(module, part, None)
        if module is None or isinstance(module, Removed):
            break
    return isinstance(module, Removed)


def head_width(net: PreTrainedModel, stack: str) -> int:
    """Return the width of an attention head of ``stack`` from the configuration."""
    return getattr(net.config, "head_dim", None) or net.config.hidden_size // _heads(net, stack)


def _heads(net: PreTrainedModel, stack: str) -> int:
    return getattr(net.config, f"{stack}_attention_heads", net.config.num_attention_heads)


def embedding_params(net: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the embeddings of ``net``."""
    architecture = get_architecture(net)
    if not architecture.stacks:
        return list(net.get_input_embeddings().parameters())
    paths = (*architecture.embeddings, *(path for stack in architecture.stacks.values() for path in stack.embeddings))
    starts = tuple(f"{path}." for path in paths)
    return [p for name, p in net.base_model.named_parameters() if name.startswith(starts)]


def token_table(net: PreTrainedModel) -> str | None:
    """Return the name of the table of token embeddings; None if it is no plain one or its tensor has other uses."""
    table = net.get_input_embeddings()
    uses = [name for name, p in net.named_parameters(remove_duplicate=False) if p is getattr(table, "weight", None)]
    if type(table) not in (nn.Embedding, SizedEmbedding) or len(uses) != 1:
        return None
    return uses[0].removesuffix(".weight")


def has(net: nn.Module, name: str) -> bool:
    """Return whether ``net`` has a submodule ``name``."""
    module: Any = net
    for part in name.split("."):
        module = getattr(module, part, None)
    return isinstance(module, nn.Module)


# ------------------------------------------------------------------------------------------------ sub-layers


def get_removable(net: PreTrainedModel) -> Architecture:
    """Return the record of ``net`` if its sub-layers can be removed.

    Raises:
        UserError: they cannot be removed.
    """
    architecture, name = get_architecture(net), net.config.model_type
    if not architecture.has_removable_sublayers:
        able = families_with(lambda other: other.has_removable_sublayers)
        even = (
            f", and SecondOrder takes '{name}' with --shape uniform (fit: --model.shape uniform)"
            if architecture.neurons_field
            else ""
        )
        raise UserError(f"model.backbone: sub-layers of '{name}' cannot be gated; those of {able} can{even}")
    if not getattr(net.config, "do_layer_norm_before", True):
        raise UserError("model.backbone: an OPT with do_layer_norm_before False (350m) cannot be gated; others can")
    return architecture


def sublayers(net: PreTrainedModel, removable: bool = True) -> list[SubLayer]:
    """Return attentions and feed-forward networks of ``net`` in forward order, those already removed included.

    Args:
        net: dense or compressed.
        removable: whether they will be removed as a whole; False: heads and neurons of them at most, as in any family.
            Then those already removed are left out.

    Raises:
        UserError: sub-layers of its architecture cannot be removed, and shall be.
    """
    architecture = get_removable(net) if removable else get_architecture(net)
    keys = getattr(net.config, "num_key_value_heads", None)
    parts = []
    for number, (stack, _, block, module) in enumerate(blocks(net)):
        for spec in architecture.sublayers:
            if spec.module and not has(net, f"{block}.{spec.module}"):
                continue
            stubs = {f"{block}.{path}": returns for path, returns in (spec.when_removed or {}).items()}
            left = {path for path in spec.linears if has(module, path) and not _taken_out(module, path)}
            paths = {path: role for path, role in spec.linears.items() if removable or path in left}
            if not paths:
                continue
            norm = f"{block}.{spec.norm}" if spec.norm and not architecture.pre_norm else None
            if spec.norm:  # also one before it, which nothing else reads: DDP refuses parameters without gradients
                stubs[f"{block}.{spec.norm}"] = "input"
            parts.append(
                SubLayer(
                    kind="ffn" if spec.kind == "ffn" else "attention",
                    layer=number,
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


def cuttable(net: PreTrainedModel) -> list[SubLayer]:
    """Return the sub-layers of ``net`` that can lose heads or neurons, in forward order, without those removed."""
    heads = get_architecture(net).cuts_heads
    return [part for part in sublayers(net, removable=False) if heads or part.kind == "ffn"]


def held_part(parts: list[SubLayer]) -> SubLayer | None:
    """Return the sub-layer that keeps one unit: a decoder's first self-attention, by which its cache counts tokens."""
    return next((part for part in parts if part.cached), None)


def of_kind(parts: list[SubLayer], kind: str) -> list[SubLayer]:
    """Return the attentions or the feed-forward networks, in order; a gate has a group for each."""
    return [part for part in parts if part.kind == kind]


# ------------------------------------------------------------------------------------------------ ends of the stream


def readers(net: PreTrainedModel) -> list[str]:
    """Return the names of the Linears after the blocks that read the last hidden states."""
    base, prefix = net.base_model, base_prefix(net)
    if getattr(base, "pooler", None) is not None:
        return [f"{prefix}pooler.dense"]
    heads = ("pooler.dense", "pre_classifier", "head.dense", "classifier.dense", "classification_head.dense",
             "qa_outputs", "classifier", "score", "lm_head")  # fmt: skip
    for name in heads:
        if has(net, name):
            return [name]
    return []


def tables(net: PreTrainedModel) -> list[str]:
    """Return the names of the embeddings that write to the stream, for models that can lose hidden dimensions."""
    architecture, prefix = get_removable(net), base_prefix(net)
    assert architecture.cuts_stream
    paths = (path for stack in architecture.stacks.values() for path in stack.writers)
    return [f"{prefix}{path}" for path in paths if has(net, f"{prefix}{path}")]


def stream_norm(net: PreTrainedModel) -> str:
    """Return the name of the norm of the embeddings, for models that can lose hidden dimensions."""
    architecture = get_removable(net)
    assert architecture.cuts_stream
    return f"{base_prefix(net)}{architecture.stacks['encoder'].norm}"


def stream_width(net: PreTrainedModel) -> int:
    """Return the number of hidden dimensions of ``net``, without those that were removed."""
    if not get_removable(net).cuts_stream:
        return net.config.hidden_size
    norm = net.get_submodule(stream_norm(net))
    return sum(p.numel() for key, p in norm.named_parameters() if key.endswith("bias"))
