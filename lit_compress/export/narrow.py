"""Deployed models of narrow hidden states: an ordinary model where they are one, or with widths filled up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_compress.layers import NarrowNorm
from lit_compress.models.architectures import get_architecture
from lit_compress.models.record import parts_of
from lit_compress.models.residual_stream import group_of, residual_stream
from lit_compress.models.sites import head_width, module_at, size_at
from lit_compress.models.surgery import fill
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def as_ordinary(net: PreTrainedModel) -> PreTrainedModel | None:
    """Return a fused Llama or Qwen3 as an ordinary one if all blocks share one basis; None for any other model.

    Its width is the number of directions, with zeros up to a multiple of the heads, which its configuration asks for;
    that norms divide by the width is in their weights and their epsilon. Norms of queries and keys have that epsilon
    too, so queries and keys grow with its square root.
    """
    norms = [module for module in net.modules() if isinstance(module, NarrowNorm)]
    if not get_architecture(net).narrows or not norms or residual_stream(net, group_of(net)).group_ends:
        return None
    stream = residual_stream(net)
    neurons = {size_at(net, sublayer.linears["down"])[1] for sublayer in stream.networks}
    if len(neurons) > 1:
        return None
    config = type(net.config).from_dict(net.config.to_dict())
    config.head_dim = head_width(net, "decoder")
    k, heads = norms[0].features, config.num_attention_heads
    width = -(-k // heads) * heads
    config.hidden_size, config.intermediate_size = width, *neurons
    config.rms_norm_eps, config.tie_word_embeddings = norms[0].eps * k / width, False
    ordinary = move(type(net)(config), net.dtype)
    values = net.state_dict()
    for name, parameter in ordinary.named_parameters():
        if name in values:
            parameter.zero_()[tuple(map(slice, values[name].shape))] = values[name]
        else:
            parameter.fill_((k / width) ** 0.5)  # a norm
    if get_architecture(net).head_norms:
        names = (block.linears[role] for block in residual_stream(ordinary).attentions for role in "qk")
        for parameter in (p for name in names for p in ordinary.get_submodule(name).parameters()):
            parameter.mul_((net.config.hidden_size / width) ** 0.5)
    if net.can_generate():
        ordinary.generation_config = net.generation_config
    return ordinary.eval()


@torch.no_grad()
def pad_widths(net: PreTrainedModel, multiple: int) -> PreTrainedModel:
    """Pad hidden states and feed-forward networks of ``net`` with zeros, in place; its outputs stay the same.

    RMSNorm then divides by the padded width; the matrices that read its output make up for it. This helps PyTorch on
    a CPU with many tokens at once, where products of other widths take longer; not for one text, nor ONNX Runtime.

    Args:
        net: with the layers of :func:`~lit_compress.models.projected.fold.fold_projections`.
        multiple: every width becomes a multiple of it.

    Raises:
        UserError: ``multiple`` is below 1; ``net`` has no narrow hidden states.
    """
    if multiple < 1:
        raise UserError(f"export: --round_to {multiple} is below 1, the smallest valid value; usual: 8")
    if not any(isinstance(module, NarrowNorm) for module in net.modules()):
        raise UserError(
            f"export: --round_to {multiple} is for models with narrow hidden states (SP3, SliceGPT); this one has none"
        )
    stream = residual_stream(net, group_of(net))
    norms = [[module_at(net, name, NarrowNorm) for name in place.norms] for place in stream.sites]
    widths = [own[0].features for own in norms]
    more = [-width % multiple for width in widths]
    scales = [1.0 if n.padded else (w / (w + m)) ** 0.5 for (n, *_), w, m in zip(norms, widths, more, strict=True)]
    written = {sublayer.writes: sublayer.reads for sublayer in stream.sublayers if not stream.pre_norm}

    def widen(name: str, rows: int = 0, columns: int = 0, scale: float = 1.0, parts: int = 1) -> Any:
        """Pad a matrix with zeros, and its bias by the new rows: as many in each of the equal ``parts`` of its rows."""
        layer: Any = net.get_submodule(name)
        parted = (scale * layer.weight).unflatten(0, (parts, -1))
        fill(layer, weight=nn.functional.pad(parted, (0, columns, 0, rows)).flatten(0, 1))
        if getattr(layer, "bias", None) is not None:
            fill(layer, bias=nn.functional.pad(layer.bias.view(parts, -1), (0, rows)).flatten())
        if hasattr(layer, "out_features"):
            layer.out_features, layer.in_features = layer.weight.shape
        return layer

    for i, (place, own) in enumerate(zip(stream.sites, norms, strict=True)):
        for name in place.tables:
            widen(name, columns=more[i]).embedding_dim = widths[i] + more[i]
        for name, norm in zip(place.norms, own, strict=True):
            if (before := written.get(i)) is not None:
                widen(name, more[i], more[before], scales[before])
                norm.in_features = widths[before] + more[before]
            norm.features, norm.eps = widths[i] + more[i], norm.eps * (scales[i] ** 2)
            norm.room += more[i + 1] if norm.room else 0
    for sublayer in stream.sublayers:
        last: Any = net.get_submodule(sublayer.linears[sublayer.last])
        neurons = -last.in_features % multiple if sublayer.kind == "ffn" else 0
        for role, read in sublayer.roles.items():
            parts = len(parts_of(role)) if neurons else 1
            widen(sublayer.linears[role], neurons, more[read], scales[read], parts)
        widen(sublayer.linears[sublayer.last], more[sublayer.writes], neurons)
        last.lead += 0 if stream.pre_norm else more[sublayer.reads]
    for sublayer in stream.group_ends:
        widen(sublayer.junction, more[sublayer.writes], more[sublayer.reads])
    widen(stream.reader, columns=more[-1], scale=scales[-1])
    return net
