"""Where attentions, feed-forward networks, their norms and the residual stream lie in each family: a table.

What families.py says of single Linears, this says of what can be taken out whole. In transformers 5 BERT, RoBERTa,
ELECTRA and DistilBERT read the number of heads from the width of the projections; OPT and DeBERTa keep it as a number
(DeBERTa computes something else, silently, when it is wrong).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lit_compress.errors import UserError
from lit_compress.families import base_prefix, blocks, get_family
from lit_compress.layers.nothing import Returns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["attention", "ffn"]


@dataclass(frozen=True)
class Part:
    """What a block has once: paths relative to the block.

    Attributes:
        kind: attention or feed-forward.
        sites: how the paths of its Linears begin.
        norm: of the LayerNorm after the residual sum, which goes with the part; None where it stands before (pre-LN).
        stubs: path of a module -> what it returns when the part is gone.
        module: path of the attention, whose attributes may have to follow the number of heads.
        also: paths of further Linears whose outputs are heads.
    """

    kind: Kind
    sites: tuple[str, ...]
    norm: str | None
    stubs: dict[str, Returns]
    module: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Residual:
    """The stream every block reads and adds to, where its width can be cut; paths relative to the base model.

    Attributes:
        norm: the LayerNorm of the embeddings.
        tables: the embeddings.
    """

    norm: str
    tables: tuple[str, ...]


@dataclass(frozen=True)
class Anatomy:
    """One family.

    Attributes:
        parts: of a block, in forward order; those that a block lacks are left out.
        residual: None where the stream keeps its width.
        attributes: head width, heads left -> attributes of the attention module to set.
        cached: the attentions number themselves for a key-value cache.
    """

    parts: tuple[Part, ...]
    residual: Residual | None = None
    attributes: Callable[[int, int], dict[str, int]] = field(default=lambda width, heads: {})
    cached: bool = False


def _bert(prefix: str, also: tuple[str, ...] = ()) -> tuple[Part, Part]:
    attention: dict[str, Returns] = {
        "attention.self": "pair", "attention.output.dense": "zero", "attention.output.LayerNorm": "input",
    }  # fmt: skip
    ffn: dict[str, Returns] = {"intermediate": "input", "output.dense": "zero", "output.LayerNorm": "input"}
    return (
        Part("attention", ("attention.",), "attention.output.LayerNorm", attention, "attention.self", also),
        Part("ffn", ("intermediate.", "output."), "output.LayerNorm", ffn),
    )


def _pre_norm(path: str) -> Part:
    return Part("attention", (f"{path}.",), None, {path: "pair"}, path)


def _post_norm(path: str) -> Part:
    norm = f"{path}_layer_norm"
    return Part("attention", (f"{path}.",), norm, {path: "pair", norm: "input"}, path)


_BART = (
    _post_norm("self_attn"),
    _post_norm("encoder_attn"),
    Part(
        "ffn", ("fc1", "fc2"), "final_layer_norm",
        {"fc1": "input", "activation_fn": "input", "fc2": "zero", "final_layer_norm": "input"},
    ),
)  # fmt: skip
_OPT = (_pre_norm("self_attn"), Part("ffn", ("fc1", "fc2"), None, {"fc1": "input", "fc2": "zero"}))
_WORDS = ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings")

ANATOMIES: dict[str, Anatomy] = {
    "bert": Anatomy(_bert("bert"), Residual("embeddings.LayerNorm", _WORDS)),
    "roberta": Anatomy(_bert("roberta"), Residual("embeddings.LayerNorm", _WORDS)),
    "electra": Anatomy(_bert("electra")),
    "distilbert": Anatomy(
        (
            Part(
                "attention",
                ("attention.",),
                "sa_layer_norm",
                {"attention": "pair", "sa_layer_norm": "input"},
                "attention",
            ),
            Part("ffn", ("ffn.",), "output_layer_norm", {"ffn": "zero", "output_layer_norm": "input"}),
        ),
        Residual("embeddings.LayerNorm", _WORDS[:2]),
    ),
    "deberta-v2": Anatomy(
        _bert("deberta", ("attention.self.pos_key_proj", "attention.self.pos_query_proj")),
        attributes=lambda width, heads: {"num_attention_heads": heads, "all_head_size": heads * width},
    ),
    "bart": Anatomy(_BART, cached=True),
    "opt": Anatomy(_OPT, attributes=lambda width, heads: {"num_heads": heads, "embed_dim": heads * width}, cached=True),
}


@dataclass(frozen=True)
class SubLayer:
    """A part of a block of a net, with full names.

    Attributes:
        kind: attention or ffn.
        layer: index of its block, over all stacks.
        block: name of the block.
        sites: role -> name of the Linear.
        also, norm, module: names, as in :class:`Part`.
        stubs: name -> what it returns when the part is gone.
        heads: number of heads of the dense net (1 for a feed-forward network).
        cached: it numbers itself for the cache of a decoder's keys and values.
    """

    kind: Kind
    layer: int
    block: str
    sites: dict[str, str]
    also: tuple[str, ...]
    norm: str | None
    module: str
    stubs: dict[str, Returns]
    heads: int
    cached: bool


def get_anatomy(net: PreTrainedModel) -> Anatomy:
    """Return the table entry of ``net``.

    Raises:
        UserError: its sub-layers cannot be taken out.
    """
    kind = net.config.model_type
    if kind not in ANATOMIES:
        raise UserError(f"model.backbone: sub-layers of '{kind}' cannot be gated; those of {', '.join(ANATOMIES)} can")
    if kind == "opt" and not net.config.do_layer_norm_before:
        raise UserError("model.backbone: an OPT with do_layer_norm_before False (350m) cannot be gated; others can")
    return ANATOMIES[kind]


def head_attributes(net: PreTrainedModel, width: int, heads: int) -> dict[str, int]:
    """Return what an attention has to be told when ``heads`` of ``width`` are left; most families see it themselves."""
    anatomy = ANATOMIES.get(net.config.model_type)
    return anatomy.attributes(width, heads) if anatomy else {}


def sublayers(net: PreTrainedModel) -> list[SubLayer]:
    """Return attentions and feed-forward networks of ``net`` in forward order, those taken out already included.

    Raises:
        UserError: its family has none that can be taken out.
    """
    anatomy, roles = get_anatomy(net), get_family(net).roles
    found = []
    for number, (stack, _, name, _) in enumerate(blocks(net)):
        heads = getattr(net.config, f"{stack}_attention_heads", net.config.num_attention_heads)
        for part in anatomy.parts:
            if part.module and not has(net, f"{name}.{part.module}"):
                continue
            sites = {role: f"{name}.{path}" for path, role in roles.items() if path.startswith(part.sites)}
            found.append(
                SubLayer(
                    part.kind, number, name, sites, tuple(f"{name}.{path}" for path in part.also),
                    part.norm and f"{name}.{part.norm}", f"{name}.{part.module}",
                    {f"{name}.{path}": returns for path, returns in part.stubs.items()},
                    heads if part.kind == "attention" else 1,
                    anatomy.cached and stack == "decoder" and part.module == "self_attn",
                )
            )  # fmt: skip
    return found


def readers(net: PreTrainedModel) -> list[str]:
    """Return the names of the Linears beyond the blocks that read the last hidden states."""
    base, prefix = net.base_model, base_prefix(net)
    if getattr(base, "pooler", None) is not None:
        return [f"{prefix}pooler.dense"]
    heads = ("pooler.dense", "pre_classifier", "classifier.dense", "classification_head.dense", "qa_outputs",
             "classifier", "score", "lm_head")  # fmt: skip
    for name in heads:
        if has(net, name):
            return [name]
    return []


def tables(net: PreTrainedModel) -> list[str]:
    """Return the names of the embeddings that make the residual stream."""
    residual, prefix = get_anatomy(net).residual, base_prefix(net)
    assert residual is not None
    return [f"{prefix}{path}" for path in residual.tables if has(net, f"{prefix}{path}")]


def stream_width(net: PreTrainedModel) -> int:
    """Return how many dimensions the hidden states of ``net`` have, also of one that was cut."""
    residual = get_anatomy(net).residual
    if residual is None:
        return net.config.hidden_size
    name = f"{base_prefix(net)}{residual.norm}"
    return sum(p.numel() for key, p in net.get_submodule(name).named_parameters() if key.endswith("bias"))


def has(net: nn.Module, name: str) -> bool:
    """Say whether ``net`` has a submodule ``name``."""
    module: Any = net
    for part in name.split("."):
        module = getattr(module, part, None)
    return isinstance(module, nn.Module)
