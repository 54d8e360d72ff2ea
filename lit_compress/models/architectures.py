"""One record per Hugging Face architecture: where its Linears, norms and embeddings are, and what can be removed.

A new architecture is one entry of ``ARCHITECTURES``. Every other file reads the record through the functions of
sites.py, residual_stream.py and slicing.py. A field at its default, None or False, says that something is not possible.
Poolers, task heads and embeddings are never sites: LPAF 4.1 and FWSVD 3 compress "the linear layers in the transformer
blocks", and only with these sites do their published parameter percentages come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lit_compress.layers.deployed.removed import Returns
from lit_compress.utils.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Role = Literal["q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"]
SubLayerType = Literal["attention", "cross", "ffn"]

FEED_FORWARD: tuple[Role, ...] = ("gate", "up", "gate_up", "down")
_FUSED: dict[str, tuple[Role, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def parts_of(role: str) -> tuple[str, ...]:
    """Return what the outputs of a Linear are, from the first: equal parts where it is several matrices in one."""
    return _FUSED.get(role, (role,))


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: transformer blocks and their embeddings; paths are relative to the base model.

    Attributes:
        blocks: path of the blocks; ``*`` stands for every index of a ModuleList.
        embeddings: paths of the embeddings; those that a net lacks are left out.
        widened_by: path of the Linear that widens the embeddings to the width of the blocks.
        norm: path of the norm of the embeddings or, in a pre-norm architecture, of the last hidden states. None where
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
        linears: path of a Linear -> what it does, in forward order; a block has some of them. ``qkv`` and ``gate_up``
            are one Linear for several matrices, which stand in it in this order.
        norm: path of its norm, which stands after the residual sum or, in a pre-norm architecture, before the
            sub-layer. None where the directions of the residual stream cannot be projected.
        when_removed: path of a module -> what its placeholder returns when the sub-layer is removed; None where it
            cannot be removed. Its norm is removed too, and not named again.
        module: path of the attention, whose attributes may have to be set to the number of heads left.
        also: paths of further Linears whose outputs are divided into heads.
    """

    kind: SubLayerType
    linears: dict[str, Role]
    norm: str | None = None
    when_removed: dict[str, Returns] | None = None
    module: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """The record of one architecture.

    Attributes:
        stacks: ``encoder``, ``decoder`` -> their paths. A stack that a net does not have (the decoder of T5's encoder
            alone) is left out.
        sublayers: sub-layers of a block, in forward order; those that a block lacks are left out.
        embeddings: paths of modules, relative to the base model, whose parameters count as embeddings, besides those
            of the stacks.
        pre_norm: the norms stand before the sub-layers.
        rms: the norms take no mean away.
        rotary: positions turn queries and keys, so that no projection may come before.
        head_norms: the queries and keys of every head are normalised, with the epsilon of all norms and one weight for
            all heads: heads may go, but no projection may come before.
        repeated: a block runs more than once, first on what no norm of a block has written.
        passes_on: a block hands more than hidden states on to the next one, so that none can be taken out.
        bare_start: the first attention has no norm before it, in a pre-norm architecture.
        narrows: a net whose hidden states have all lost the same directions is an ordinary one, as the configuration
            has the width of heads, ``rms_norm_eps`` and the other widths apart.
        activation: what the configuration calls the activation of the neurons. None: constant neurons are not cut.
        removes_heads: the attention finds its number of heads from the width of the projections, so that constant
            heads can be cut.
        head_attributes: head width, heads left -> attributes of the attention module to set. None: there are none.
        cuts_stream: the width of the residual stream can be cut.
        cached: the attentions number themselves for a key-value cache.
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
    bare_start: bool = False
    narrows: bool = False
    activation: str | None = None
    removes_heads: bool = False
    head_attributes: Callable[[int, int], dict[str, int]] | None = None
    cuts_stream: bool = False
    cached: bool = False

    @property
    def norms(self) -> dict[SubLayerType, str]:
        """Type of a sub-layer -> path of its norm; empty where the residual stream cannot be projected."""
        return {spec.kind: spec.norm for spec in self.sublayers if spec.norm is not None}

    @property
    def cuts_heads(self) -> bool:
        """Whether an attention can have fewer heads."""
        return self.removes_heads or self.head_attributes is not None

    @property
    def has_removable_sublayers(self) -> bool:
        """Whether sub-layers can be gated and removed."""
        return all(spec.when_removed is not None for spec in self.sublayers)

    @property
    def has_residual_stream(self) -> bool:
        """Whether the directions of the residual stream, of heads or of neurons can be projected."""
        return all(stack.norm is not None for stack in self.stacks.values())


def _under(path: str, linears: dict[str, Role]) -> dict[str, Role]:
    return {f"{path}.{name}": role for name, role in linears.items()}


def _feed_forward(path: str) -> dict[str, Role]:
    """Return the roles of T5's two forms of a feed-forward network."""
    return _under(path, {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"})


def _bert(suffix: str = "", also: tuple[str, ...] = ()) -> tuple[SubLayerSpec, SubLayerSpec]:
    """Return the sub-layers of BERT and similar architectures; ``suffix`` is that of the names of q, k, v."""
    attention, output = "attention.self", "attention.output.dense"
    return (
        SubLayerSpec(
            "attention",
            {
                **_under(attention, {f"query{suffix}": "q", f"key{suffix}": "k", f"value{suffix}": "v"}),
                output: "o",
            },
            norm="attention.output.LayerNorm",
            when_removed={attention: "pair", output: "zero"},
            module=attention,
            also=tuple(f"{attention}.{name}" for name in also),
        ),
        SubLayerSpec(
            "ffn",
            {"intermediate.dense": "up", "output.dense": "down"},
            norm="output.LayerNorm",
            when_removed={"intermediate": "input", "output.dense": "zero"},
        ),
    )


def _attention(path: str, kind: SubLayerType = "attention") -> SubLayerSpec:
    """Return an attention of BART or OPT."""
    linears: dict[str, Role] = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
    return SubLayerSpec(kind, _under(path, linears), f"{path}_layer_norm", {path: "pair"}, module=path)


_WORDS = ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings")
_NORM = "embeddings.LayerNorm"
_BERT = Architecture(
    stacks={"encoder": Stack("encoder.layer.*", _WORDS, norm=_NORM)},
    sublayers=_bert(),
    embeddings=("embeddings",),
    activation="hidden_act",
    removes_heads=True,
    cuts_stream=True,
)
_LLAMA = Architecture(
    stacks={"decoder": Stack("layers.*", ("embed_tokens",), norm="norm")},
    sublayers=(
        SubLayerSpec(
            "attention",
            _under("self_attn", {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}),
            norm="input_layernorm",
        ),
        SubLayerSpec(
            "ffn",
            _under("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}),
            norm="post_attention_layernorm",
        ),
    ),
    pre_norm=True,
    rms=True,
    rotary=True,
    narrows=True,
    activation="hidden_act",
    removes_heads=True,
)

# norms before and after every sub-layer, and embeddings that are multiplied, so the stream is not projected
_GEMMA = replace(
    _LLAMA,
    stacks={"decoder": Stack("layers.*", ("embed_tokens",))},
    sublayers=tuple(replace(spec, norm=None) for spec in _LLAMA.sublayers),
    narrows=False,
    activation="hidden_activation",
)

ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    # like T5, all layers share the heads of one bias of relative positions
    "mpnet": Architecture(
        stacks={"encoder": Stack("encoder.layer.*", _WORDS[:2])},
        sublayers=(
            SubLayerSpec("attention", _under("attention.attn", {"q": "q", "k": "k", "v": "v", "o": "o"})),
            SubLayerSpec("ffn", {"intermediate.dense": "up", "output.dense": "down"}),
        ),
        embeddings=("embeddings", "encoder.relative_attention_bias"),
        activation="hidden_act",
    ),
    "electra": replace(
        _BERT,
        stacks={"encoder": Stack("encoder.layer.*", _WORDS, "embeddings_project", _NORM)},
        cuts_stream=False,
    ),
    "distilbert": Architecture(
        stacks={"encoder": Stack("transformer.layer.*", _WORDS[:2], norm=_NORM)},
        sublayers=(
            SubLayerSpec(
                "attention",
                _under("attention", {"q_lin": "q", "k_lin": "k", "v_lin": "v", "out_lin": "o"}),
                norm="sa_layer_norm",
                when_removed={"attention": "pair"},
                module="attention",
            ),
            SubLayerSpec(
                "ffn", {"ffn.lin1": "up", "ffn.lin2": "down"}, norm="output_layer_norm", when_removed={"ffn": "zero"}
            ),
        ),
        embeddings=("embeddings",),
        activation="activation",
        removes_heads=True,
        cuts_stream=True,
    ),
    # a block is one object that runs num_hidden_layers / num_hidden_groups times
    "albert": Architecture(
        stacks={
            "encoder": Stack(
                "encoder.albert_layer_groups.*.albert_layers.*", _WORDS, "encoder.embedding_hidden_mapping_in", _NORM
            )
        },
        sublayers=(
            SubLayerSpec(
                "attention",
                _under("attention", {"query": "q", "key": "k", "value": "v", "dense": "o"}),
                norm="attention.LayerNorm",
            ),
            SubLayerSpec("ffn", {"ffn": "up", "ffn_output": "down"}, norm="full_layer_layer_norm"),
        ),
        embeddings=("embeddings",),
        repeated=True,
    ),
    # its attention has the number of heads as an attribute, and is silently wrong if that is wrong
    "deberta-v2": Architecture(
        stacks={"encoder": Stack("encoder.layer.*", _WORDS, norm=_NORM)},
        sublayers=_bert("_proj", also=("pos_key_proj", "pos_query_proj")),
        embeddings=("embeddings", "encoder.rel_embeddings"),
        head_attributes=lambda width, heads: {"num_attention_heads": heads, "all_head_size": heads * width},
    ),
    # q, k, v are one Linear, and so are gate and up; it begins with a norm of the embeddings
    "modernbert": Architecture(
        stacks={"encoder": Stack("layers.*", ("embeddings.tok_embeddings",), norm="final_norm")},
        sublayers=(
            SubLayerSpec(
                "attention",
                {"attn.Wqkv": "qkv", "attn.Wo": "o"},
                norm="attn_norm",
                when_removed={"attn": "pair"},
                module="attn",
            ),
            SubLayerSpec(
                "ffn", {"mlp.Wi": "gate_up", "mlp.Wo": "down"}, norm="mlp_norm", when_removed={"mlp": "zero"}
            ),
        ),
        embeddings=("embeddings",),
        pre_norm=True,
        rotary=True,
        bare_start=True,
        activation="hidden_activation",
        removes_heads=True,
    ),
    "opt": Architecture(
        stacks={
            "decoder": Stack(
                "decoder.layers.*",
                ("decoder.embed_tokens", "decoder.embed_positions"),
                "decoder.project_in",
                "decoder.final_layer_norm",
            )
        },
        sublayers=(
            _attention("self_attn"),
            SubLayerSpec(
                "ffn",
                {"fc1": "up", "fc2": "down"},
                norm="final_layer_norm",
                when_removed={"fc1": "input", "fc2": "zero"},
            ),
        ),
        pre_norm=True,
        activation="activation_function",
        head_attributes=lambda width, heads: {"num_heads": heads, "embed_dim": heads * width},
        cached=True,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, head_norms=True),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, head_norms=True),
    "bart": Architecture(
        stacks={
            stack: Stack(
                f"{stack}.layers.*",
                (f"{stack}.embed_tokens", f"{stack}.embed_positions"),
                norm=f"{stack}.layernorm_embedding",
            )
            for stack in ("encoder", "decoder")
        },
        sublayers=(
            _attention("self_attn"),
            _attention("encoder_attn", "cross"),
            SubLayerSpec(
                "ffn",
                {"fc1": "up", "fc2": "down"},
                norm="final_layer_norm",
                when_removed={"fc1": "input", "activation_fn": "input", "fc2": "zero"},
            ),
        ),
        embeddings=("shared",),
        activation="activation_function",
        removes_heads=True,
        cached=True,
    ),
    # the feed-forward network is plain (wi) or gated (wi_0, wi_1); number 1 in a block, 2 in a decoder's. All layers
    # share the heads of one bias of relative positions, so heads are not removed
    "t5": Architecture(
        stacks={
            stack: Stack(f"{stack}.block.*", (f"{stack}.embed_tokens",)) for stack in ("encoder", "decoder")
        },
        sublayers=(
            SubLayerSpec("attention", _under("layer.0.SelfAttention", {"q": "q", "k": "k", "v": "v", "o": "o"})),
            SubLayerSpec("cross", _under("layer.1.EncDecAttention", {"q": "q", "k": "k", "v": "v", "o": "o"})),
            SubLayerSpec(
                "ffn", _feed_forward("layer.1.DenseReluDense") | _feed_forward("layer.2.DenseReluDense")
            ),
        ),
        embeddings=(
            "shared",
            *(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias" for stack in ("encoder", "decoder")),
        ),
        passes_on=True,
        activation="dense_act_fn",
    ),
}  # fmt: skip


def get_architecture(net: PreTrainedModel) -> Architecture:
    """Return the record of the architecture of ``net``.

    Raises:
        UserError: the architecture has no record; the message names the nearest one.
    """
    name = net.config.model_type
    if name not in ARCHITECTURES:
        raise UserError(f"model.backbone: architecture '{name}' is not supported; {nearest(name, ARCHITECTURES)}")
    return ARCHITECTURES[name]


def families_with(capability: Callable[[Architecture], object]) -> str:
    """Return the names of the architectures that have ``capability``, for errors that refuse another one."""
    return ", ".join(name for name, architecture in ARCHITECTURES.items() if capability(architecture))
