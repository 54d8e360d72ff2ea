"""Where the Linears of the transformer blocks live in each Hugging Face family: a table.

A new architecture is one entry. Paths are relative to the base model (``net.base_model``). Poolers, task
heads and embeddings are never sites (LPAF 4.1 and FWSVD 3 compress "the linear layers in the
transformer blocks"; their published parameter percentages hold only so).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from lit_compress.errors import UserError, nearest
from lit_compress.layers.nothing import Nothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Role = Literal["q", "k", "v", "o", "gate", "up", "down"]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        stacks: name of a stack of blocks -> path of its blocks; ``*`` stands for every index of a ModuleList. One that
            a net does not have (T5's encoder alone, BART's decoder) is left out.
        roles: path of a Linear inside a block -> what it does, in forward order; a block has some of them.
        embeddings: how the names of the embeddings' parameters begin; left out of the non-embedding count.
        cross: path of a decoder block's attention over the encoder's states, with its dot.
    """

    stacks: dict[str, str]
    roles: dict[str, Role]
    embeddings: tuple[str, ...] = ("embeddings.",)
    cross: str = "-"


_STACKS = ("encoder", "decoder")


def _feed_forward(path: str) -> dict[str, Role]:
    """Return the roles of T5's two forms of a feed-forward network."""
    return {f"{path}.wi": "up", f"{path}.wi_0": "gate", f"{path}.wi_1": "up", f"{path}.wo": "down"}


_BERT = Family(
    stacks={"encoder": "encoder.layer.*"},
    roles={
        "attention.self.query": "q",
        "attention.self.key": "k",
        "attention.self.value": "v",
        "attention.output.dense": "o",
        "intermediate.dense": "up",
        "output.dense": "down",
    },
)

FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "roberta": _BERT,
    "electra": _BERT,
    "distilbert": Family(
        stacks={"encoder": "transformer.layer.*"},
        roles={
            "attention.q_lin": "q",
            "attention.k_lin": "k",
            "attention.v_lin": "v",
            "attention.out_lin": "o",
            "ffn.lin1": "up",
            "ffn.lin2": "down",
        },
    ),
    # a block is one object that runs num_hidden_layers / num_hidden_groups times
    "albert": Family(
        stacks={"encoder": "encoder.albert_layer_groups.*.albert_layers.*"},
        roles={
            "attention.query": "q",
            "attention.key": "k",
            "attention.value": "v",
            "attention.dense": "o",
            "ffn": "up",
            "ffn_output": "down",
        },
    ),
    "deberta-v2": Family(
        stacks={"encoder": "encoder.layer.*"},
        roles={
            "attention.self.query_proj": "q",
            "attention.self.key_proj": "k",
            "attention.self.value_proj": "v",
            "attention.output.dense": "o",
            "intermediate.dense": "up",
            "output.dense": "down",
        },
        embeddings=("embeddings.", "encoder.rel_embeddings."),
    ),
    "opt": Family(
        stacks={"decoder": "decoder.layers.*"},
        roles={
            "self_attn.q_proj": "q",
            "self_attn.k_proj": "k",
            "self_attn.v_proj": "v",
            "self_attn.out_proj": "o",
            "fc1": "up",
            "fc2": "down",
        },
        embeddings=("decoder.embed_tokens.", "decoder.embed_positions."),
    ),
    "llama": Family(
        stacks={"decoder": "layers.*"},
        roles={
            "self_attn.q_proj": "q",
            "self_attn.k_proj": "k",
            "self_attn.v_proj": "v",
            "self_attn.o_proj": "o",
            "mlp.gate_proj": "gate",
            "mlp.up_proj": "up",
            "mlp.down_proj": "down",
        },
        embeddings=("embed_tokens.",),
    ),
    "bart": Family(
        stacks={"encoder": "encoder.layers.*", "decoder": "decoder.layers.*"},
        roles={
            "self_attn.q_proj": "q",
            "self_attn.k_proj": "k",
            "self_attn.v_proj": "v",
            "self_attn.out_proj": "o",
            "encoder_attn.q_proj": "q",
            "encoder_attn.k_proj": "k",
            "encoder_attn.v_proj": "v",
            "encoder_attn.out_proj": "o",
            "fc1": "up",
            "fc2": "down",
        },
        embeddings=("shared.", *(f"{stack}.embed_{what}." for stack in _STACKS for what in ("tokens", "positions"))),
        cross="encoder_attn.",
    ),
    # the feed-forward network is plain (wi) or gated (wi_0, wi_1); part 1 of a block, 2 in a decoder
    "t5": Family(
        stacks={"encoder": "encoder.block.*", "decoder": "decoder.block.*"},
        roles={
            "layer.0.SelfAttention.q": "q",
            "layer.0.SelfAttention.k": "k",
            "layer.0.SelfAttention.v": "v",
            "layer.0.SelfAttention.o": "o",
            "layer.1.EncDecAttention.q": "q",
            "layer.1.EncDecAttention.k": "k",
            "layer.1.EncDecAttention.v": "v",
            "layer.1.EncDecAttention.o": "o",
            **_feed_forward("layer.1.DenseReluDense"),
            **_feed_forward("layer.2.DenseReluDense"),
        },
        embeddings=(
            "shared.",
            *(f"{stack}.embed_tokens." for stack in _STACKS),
            *(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias." for stack in _STACKS),
        ),
        cross="layer.1.EncDecAttention.",
    ),
}


@dataclass(frozen=True)
class Site:
    """A named place in the net that a method may compress.

    Attributes:
        name: full name in the net, as ``net.get_submodule`` takes it.
        role: q, k, v, o (attention), up, down (feed-forward), gate (the activated one of two first matrices).
        layer: index of the block in its stack.
        stack: ``encoder`` or ``decoder``.
        cross: it belongs to a decoder's attention over the encoder's states, where k and v read those.
    """

    name: str
    role: Role
    layer: int
    stack: str
    cross: bool = False


def get_family(net: PreTrainedModel) -> Family:
    """Return the table entry of ``net``.

    Raises:
        UserError: the architecture has no entry; names the nearest one.
    """
    kind = net.config.model_type
    if kind not in FAMILIES:
        raise UserError(f"model.backbone: architecture '{kind}' is not supported; {nearest(kind, FAMILIES)}")
    return FAMILIES[kind]


def base_prefix(net: PreTrainedModel) -> str:
    """Return the name of the base model inside ``net`` with its dot, or "" if ``net`` is the base model."""
    return "" if net.base_model is net else f"{net.base_model_prefix}."


def blocks(net: PreTrainedModel) -> Iterator[tuple[str, int, str, nn.Module]]:
    """Yield (stack, layer, full name, module) of every transformer block."""
    prefix = base_prefix(net)
    for stack, pattern in get_family(net).stacks.items():
        if not hasattr(net.base_model, pattern.partition(".")[0]):
            continue
        for layer, (path, block) in enumerate(_matches(net.base_model, pattern)):
            yield stack, layer, f"{prefix}{path}", block


def _matches(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of every submodule that ``pattern`` stands for, in order."""
    before, star, after = pattern.partition(".*")
    found = module.get_submodule(before)
    if not star:
        yield before, found
        return
    for i in range(len(found)):  # type: ignore[arg-type]
        yield from _matches(module, f"{before}.{i}{after}")


def find_sites(net: PreTrainedModel) -> list[Site]:
    """Return every site of ``net`` in forward order, whatever stands there now (Linear or its replacement).

    Sites of a sub-layer that was taken out are left out.

    Raises:
        UserError: unknown architecture.
    """
    family = get_family(net)
    found = []
    for stack, layer, name, block in blocks(net):
        inside = {path for path, _ in block.named_modules()}
        gone = {path for path in family.roles if _taken_out(block, path)}
        own = {path: role for path, role in family.roles.items() if path in inside | gone}
        assert {"q", "k", "v", "o", "up", "down"} <= set(own.values()), f"{name} has only {list(own)}"
        found += [
            Site(f"{name}.{path}", role, layer, stack, path.startswith(family.cross))
            for path, role in own.items()
            if path not in gone
        ]
    return found


def unplaced(net: PreTrainedModel) -> list[str]:
    """Return the names of the Linears inside the blocks of ``net`` that no entry of the table places."""
    sites = {site.name for site in find_sites(net)}
    inside = (f"{name}.{path}" for *_, name, block in blocks(net) for path, m in block.named_modules() if _linear(m))
    return [name for name in inside if name not in sites]


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def head_width(net: PreTrainedModel, stack: str) -> int:
    """Return the width of an attention head of ``stack`` as the configuration has it."""
    config = net.config
    heads = getattr(config, f"{stack}_attention_heads", config.num_attention_heads)
    return getattr(config, "head_dim", None) or config.hidden_size // heads


def _taken_out(block: nn.Module, path: str) -> bool:
    """Say whether the module at ``path``, or one around it, was replaced by nothing."""
    for part in path.split("."):
        block = getattr(block, part, None)  # type: ignore[assignment]
        if block is None or isinstance(block, Nothing):
            break
    return isinstance(block, Nothing)


def embedding_params(net: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the embeddings of ``net``."""
    starts = get_family(net).embeddings
    return [p for name, p in net.base_model.named_parameters() if name.startswith(starts)]
