"""One record per Hugging Face architecture: where its Linears, norms and embeddings are, and which can be removed.

A new architecture is one entry of ``ARCHITECTURES``; record.py explains its fields. Every other file reads the record
through the functions of sites.py and residual_stream.py. A field at its default, None or False, says that
something is not possible. Poolers, task heads and embeddings are never sites: LPAF 4.1 and FWSVD 3 compress "the linear
layers in the transformer blocks", and only with these sites do their published parameter percentages come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lit_compress.layers.deployed.adopted import SomeHeads, SomeT5Heads
from lit_compress.models.record import Architecture, Returns, Role, Stack, SubLayerSpec, SubLayerType
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.types import Model


def _under(path: str, linears: dict[str, Role]) -> dict[str, Role]:
    return {f"{path}.{name}": role for name, role in linears.items()}


def _t5(path: str, linears: dict[str, Role], kind: SubLayerType = "attention") -> SubLayerSpec:
    """Return a sub-layer of T5, the module at ``path``; the layer around it has its norm."""
    stubs: dict[str, Returns] = {path: "zero" if kind == "ffn" else "triple", f"{path[:7]}.layer_norm": "input"}
    stays = f"{path}.relative_attention_bias" if kind == "attention" else ""
    return SubLayerSpec(kind, _under(path, linears), when_removed=stubs, module=path, stays=stays)


def _bert(suffix: str = "", also: tuple[str, ...] = ()) -> tuple[SubLayerSpec, SubLayerSpec]:
    """Return the sub-layers of BERT and similar architectures; ``suffix`` ends the names of q, k, v."""
    attention, output = "attention.self", "attention.output.dense"
    linears = _under(attention, {f"query{suffix}": "q", f"key{suffix}": "k", f"value{suffix}": "v"})
    return (
        SubLayerSpec(
            "attention", linears | {output: "o"}, "attention.output.LayerNorm", {attention: "pair", output: "zero"},
            attention, tuple(f"{attention}.{name}" for name in also),
        ),
        SubLayerSpec(
            "ffn", {"intermediate.dense": "up", "output.dense": "down"}, "output.LayerNorm",
            {"intermediate": "input", "output.dense": "zero"},
        ),
    )  # fmt: skip


def _attention(path: str, kind: SubLayerType = "attention") -> SubLayerSpec:
    """Return an attention of BART or OPT."""
    linears: dict[str, Role] = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
    return SubLayerSpec(kind, _under(path, linears), f"{path}_layer_norm", {path: "pair"}, path)


def _whole(path: str, linears: dict[str, Role], norm: str, kind: SubLayerType = "attention") -> SubLayerSpec:
    """Return a sub-layer that is one module at ``path``, and removed with it."""
    returns: Returns = "zero" if kind == "ffn" else "pair"
    return SubLayerSpec(kind, _under(path, linears), norm, {path: returns}, "" if kind == "ffn" else path)


_QKVO: dict[str, Role] = {"q": "q", "k": "k", "v": "v", "o": "o"}
_WI_WO: dict[str, Role] = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
_WORDS = ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings")
_NORM = "embeddings.LayerNorm"
_BERT = Architecture(
    stacks={"encoder": Stack("encoder.layer.*", _WORDS, norm=_NORM)},
    sublayers=_bert(),
    embeddings=("embeddings",), removes_heads=True, cuts_stream=True,
)  # fmt: skip
_LLAMA = Architecture(
    stacks={"decoder": Stack("layers.*", ("embed_tokens",), norm="norm")},
    sublayers=(
        _whole("self_attn", {f"{name}_proj": role for name, role in _QKVO.items()}, "input_layernorm"),
        _whole("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}, "post_attention_layernorm", "ffn"),
    ),
    pre_norm=True, rms=True, rotary=True, removes_heads=True, cached=True, gated=False,
    heads_fields=("num_attention_heads", "num_key_value_heads"),
)  # fmt: skip

# its block adds what attention and network find in the same hidden states; every head has its q, k, v together
_GPT_NEOX = Architecture(
    stacks={"decoder": Stack("layers.*", ("embed_in",), norm="final_layer_norm")},
    sublayers=(
        _whole("attention", {"query_key_value": "qkv_by_head", "dense": "o"}, "input_layernorm"),
        _whole("mlp", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"}, "post_attention_layernorm", "ffn"),
    ),
    keeps_basis="its attentions and networks read the same hidden states",
    pre_norm=True, rotary=True, removes_heads=True, cached=True,
)  # fmt: skip

# norms before and after every sub-layer, and embeddings that are multiplied, so the stream is not projected
_GEMMA = replace(
    _LLAMA,
    stacks={"decoder": Stack("layers.*", ("embed_tokens",))},
    sublayers=tuple(replace(spec, norm=None, when_removed=None) for spec in _LLAMA.sublayers),
    keeps_basis="norms are before and after every sub-layer",
    activation="hidden_activation",
)

ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta"), _BERT),
    # BERT with a bias of relative positions, of which all layers read the same columns, one per head
    "mpnet": Architecture(
        stacks={"encoder": Stack("encoder.layer.*", _WORDS[:2], norm=_NORM)},
        sublayers=(
            _whole("attention.attn", _QKVO, "attention.LayerNorm"),
            _BERT.sublayers[1],
        ),
        embeddings=("embeddings", "encoder.relative_attention_bias"), cuts_stream=True, shares_bias=SomeHeads,
        parts_returned=1,
    ),
    "electra": replace(
        _BERT,
        stacks={"encoder": Stack("encoder.layer.*", _WORDS, "embeddings_project", _NORM)},
        cuts_stream=False,
    ),
    "distilbert": Architecture(
        stacks={"encoder": Stack("transformer.layer.*", _WORDS[:2], norm=_NORM)},
        sublayers=(
            _whole("attention", {"q_lin": "q", "k_lin": "k", "v_lin": "v", "out_lin": "o"}, "sa_layer_norm"),
            _whole("ffn", {"lin1": "up", "lin2": "down"}, "output_layer_norm", "ffn"),
        ),
        embeddings=("embeddings",), activation="activation", removes_heads=True, cuts_stream=True,
        neurons_field="hidden_dim",
    ),
    # a block is one object that runs num_hidden_layers / num_hidden_groups times
    "albert": Architecture(
        stacks={
            "encoder": Stack(
                "encoder.albert_layer_groups.*.albert_layers.*", _WORDS, "encoder.embedding_hidden_mapping_in", _NORM
            )
        },
        sublayers=(
            SubLayerSpec("attention", _under("attention", {"query": "q", "key": "k", "value": "v", "dense": "o"}),
                         "attention.LayerNorm"),
            SubLayerSpec("ffn", {"ffn": "up", "ffn_output": "down"}, "full_layer_layer_norm"),
        ),
        embeddings=("embeddings",), repeated=True,
    ),
    # its attention has the number of heads as an attribute, and is silently wrong if that is wrong
    "deberta-v2": Architecture(
        stacks={"encoder": Stack("encoder.layer.*", _WORDS)},
        sublayers=_bert("_proj", also=("pos_key_proj", "pos_query_proj")),
        embeddings=("embeddings", "encoder.rel_embeddings"),
        parts_returned=2, keeps_basis="its positions go through the same queries and keys",
        head_attributes=lambda width, heads: {"num_attention_heads": heads, "all_head_size": heads * width},
    ),
    # q, k, v are one Linear, and so are gate and up; it begins with a norm of the embeddings
    "modernbert": Architecture(
        stacks={"encoder": Stack("layers.*", ("embeddings.tok_embeddings",), norm="final_norm")},
        sublayers=(
            _whole("attn", {"Wqkv": "qkv", "Wo": "o"}, "attn_norm"),
            _whole("mlp", {"Wi": "gate_up", "Wo": "down"}, "mlp_norm", "ffn"),
        ),
        embeddings=("embeddings",), pre_norm=True, rotary=True, bare_start=True, activation="hidden_activation",
        removes_heads=True,
    ),
    "opt": Architecture(
        stacks={
            "decoder": Stack("decoder.layers.*", ("decoder.embed_tokens", "decoder.embed_positions"),
                             "decoder.project_in", "decoder.final_layer_norm")
        },
        sublayers=(
            _attention("self_attn"),
            SubLayerSpec("ffn", {"fc1": "up", "fc2": "down"}, "final_layer_norm", {"fc1": "input", "fc2": "zero"}),
        ),
        pre_norm=True, activation="activation_function", cached=True, neurons_field="ffn_dim",
        head_attributes=lambda width, heads: {"num_heads": heads, "embed_dim": heads * width},
    ),
    # its projections are transposed in files (surgery.py); q, k, v are one, and the attention has their width
    "gpt2": Architecture(
        stacks={"decoder": Stack("h.*", ("wte", "wpe"), norm="ln_f")},
        sublayers=(
            _whole("attn", {"c_attn": "qkv", "c_proj": "o"}, "ln_1"),
            _whole("mlp", {"c_fc": "up", "c_proj": "down"}, "ln_2", "ffn"),
        ),
        keeps_basis="its blocks have no form with bases of their own",
        pre_norm=True, activation="activation_function", cached=True, neurons_field="n_inner",
        head_attributes=lambda width, heads: {"split_size": heads * width},
    ),
    "gpt_neox": _GPT_NEOX,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": replace(_LLAMA, heads_fields=()),  # the configuration does not name the width of a head
    "qwen3": replace(_LLAMA, head_norms=True),
    # q, k, v are one Linear, of unequal widths where queries share keys; their widths are in the configuration
    "phi3": replace(
        _LLAMA,
        sublayers=(
            replace(_LLAMA.sublayers[0], linears={"self_attn.qkv_proj": "qkv", "self_attn.o_proj": "o"}),
            replace(_LLAMA.sublayers[1], linears={"mlp.gate_up_proj": "gate_up", "mlp.down_proj": "down"}),
        ),
        removes_heads=False, heads_fields=(),
    ),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, head_norms=True),
    "bart": Architecture(
        stacks={
            stack: Stack(f"{stack}.layers.*", (f"{stack}.embed_tokens", f"{stack}.embed_positions"),
                         norm=f"{stack}.layernorm_embedding")
            for stack in ("encoder", "decoder")
        },
        sublayers=(
            _attention("self_attn"),
            _attention("encoder_attn", "cross"),
            SubLayerSpec("ffn", {"fc1": "up", "fc2": "down"}, "final_layer_norm",
                         {"fc1": "input", "activation_fn": "input", "fc2": "zero"}),
        ),
        embeddings=("shared",), activation="activation_function", removes_heads=True, cached=True,
        neurons_field="{stack}_ffn_dim",
    ),
    # the feed-forward network is plain (wi) or gated (wi_0, wi_1); number 1 in a block, 2 in a decoder's. The first
    # block of a stack has the bias of relative positions, which all its blocks read
    "t5": Architecture(
        stacks={stack: Stack(f"{stack}.block.*", (f"{stack}.embed_tokens",)) for stack in ("encoder", "decoder")},
        sublayers=(
            _t5("layer.0.SelfAttention", _QKVO),
            _t5("layer.1.EncDecAttention", _QKVO, "cross"),
            *(_t5(f"layer.{number}.DenseReluDense", _WI_WO, "ffn") for number in (1, 2)),
        ),
        embeddings=(
            "shared",
            *(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias" for stack in ("encoder", "decoder")),
        ),
        keeps_basis="its sub-layers have no form with bases of their own",
        passes_on=True, activation="dense_act_fn", shares_bias=SomeT5Heads, cached=True, neurons_field="d_ff",
    ),
}  # fmt: skip


def get_architecture(net: Model) -> Architecture:
    """Return the record of the architecture of ``net``.

    Raises:
        UserError: the architecture has no record; the message names the nearest one.
    """
    name = net.config.model_type
    if name not in ARCHITECTURES:
        raise UserError(
            f"model.backbone: architecture '{name}' is not supported; {nearest(name, ARCHITECTURES)} Else add a record "
            "(docs/how_to/add_an_architecture.md)"
        )
    return ARCHITECTURES[name]


def families_with(capability: Callable[[Architecture], object]) -> str:
    """Return the names of the architectures that have ``capability``, for errors that refuse another one."""
    return ", ".join(name for name, architecture in ARCHITECTURES.items() if capability(architecture))
