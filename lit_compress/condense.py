"""Multiply SP3's projections and gates into narrow layers (Hu et al. 2024, Eqs. 15-18).

With the gates z of a site and its projections, what stands between two sites becomes, in float64 (the paper swaps M and
F in Eq. 15):

    A = diag(z) P_in restricted to the rows with z > 0,  a = z * shift        what is written to the site
    B = P_out diag(z) restricted to those columns,  beta                      what is read from it
    W_R = A' B,  W_Q = z_qk P_Q W_Q B,  W_O = z_mha A' W_O P_O,  W_U = W_U[kept] B,  W_D = z_ffn A' W_D z_f

Only a site's own norm sees a, once, in the bias of W_R. RMSNorm over k kept directions divides by k; the original width
d stays the divisor: eps d / k, and sqrt(d / k) in B. Where norms stand before the blocks (projected.py), P_in and P_out
are in the weights already, and W_R stands where the basis changes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.errors import UserError
from lit_compress.families import base_prefix, head_width
from lit_compress.layers import (
    NarrowLinear,
    NarrowNorm,
    Nothing,
    ProjectedLinear,
    ProjectedNorm,
    SizedEmbedding,
    SizedLinear,
    StreamNorm,
    StreamTable,
)
from lit_compress.projected import fill, has_head_projections, plain
from lit_compress.streams import Block, Layout, group_of, layout
from lit_compress.sublayers import has, head_attributes
from lit_compress.surgery import replace, set_attributes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Site:
    """One site, multiplied out: A, a, B, beta, and the norm that is left."""

    write: Tensor
    shift: Tensor
    read: Tensor
    beta: Tensor
    eps: float
    padded: int = 0

    @property
    def width(self) -> int:
        return len(self.shift)


def _site(module: ProjectedNorm | StreamNorm) -> _Site:
    d = module.features
    z = module.z.double()
    kept = z > 0
    k = int(kept.sum())
    ratio = d / k
    if isinstance(module, StreamNorm):
        pick, zero = torch.eye(d).double()[kept], torch.zeros(d).double()
        read = pick.mT * z[kept]
        return _Site(z[kept, None] * pick, zero[kept], read * ratio**0.5, zero, module.eps * ratio)
    p_in, p_out, shift = (p.detach().double() for p in (module.p_in, module.p_out, module.shift))
    write, read, beta = z[kept, None] * p_in[kept], p_out[:, kept] * z[kept], module.bias.detach().double()
    if module.norm == "padded_layernorm":
        scale, offset = (p.detach().double()[kept] for p in (module.scale, module.offset))
        return _Site(write, (z * shift)[kept], read * scale, beta + read @ offset, module.eps, d)
    return _Site(write, (z * shift)[kept], read * ratio**0.5, beta, module.eps * ratio)


def is_projected(net: PreTrainedModel) -> bool:
    """Whether ``net`` is in SP3's training form."""
    return any(isinstance(module, (ProjectedNorm, StreamNorm, ProjectedLinear)) for module in net.modules())


@torch.no_grad()
def fuse_projections(net: PreTrainedModel) -> PreTrainedModel:
    """Multiply projections and gates of ``net`` into narrow layers, in place; its outputs in evaluation mode stay."""
    dtype = net.dtype
    parts = layout(net, group_of(net))
    first = net.get_submodule(parts.sites[0].norms[0])
    if isinstance(first, (ProjectedNorm, StreamNorm)):
        sites = [_site(net.get_submodule(place.norms[0])) for place in parts.sites]  # type: ignore[arg-type]
        _fuse_stream(net, parts, sites)
    else:
        d = net.config.hidden_size
        one, zero = torch.eye(d).double(), torch.zeros(d).double()
        sites = [_Site(one, zero, one, zero, 0.0)] * len(parts.sites)
    relative = _take_positions(net)
    for block in parts.blocks:
        lead = 0 if parts.before or not isinstance(first, ProjectedNorm) else sites[block.reads].width
        if block.part == "ffn":
            _fuse_ffn(net, block, sites, lead)
        elif has_head_projections(net):
            if relative is not None:
                _fuse_positions(net, block.linears, relative)
            _fuse_attention(net, block, sites, lead)
        else:
            for role in "qkv":
                replace(net, block.linears[role], _reader(net, block.linears[role], sites[block.reads]))
            weight, bias = plain(net.get_submodule(block.linears["o"]))
            replace(net, block.linears["o"], _writer(weight, bias, sites[block.writes]))
    return net.to(dtype)


@torch.no_grad()
def stock(net: PreTrainedModel) -> PreTrainedModel | None:
    """Return the ordinary Llama that a fused one is where all blocks share one basis; None for any other net.

    Its width is the number of directions, with zeros up to a multiple of the heads, which its configuration asks for;
    that norms divide by the width is in their weights and their epsilon.
    """
    norms = [module for module in net.modules() if isinstance(module, NarrowNorm)]
    if net.config.model_type != "llama" or not norms or layout(net, group_of(net)).ends:
        return None
    parts = layout(net)
    neurons = {net.get_submodule(block.linears["down"]).in_features for block in parts.networks}
    if len(neurons) > 1:
        return None
    config = type(net.config).from_dict(net.config.to_dict())
    config.head_dim = head_width(net, "decoder")
    k, heads = norms[0].features, config.num_attention_heads
    width = -(-k // heads) * heads
    config.hidden_size, config.intermediate_size = width, *neurons
    config.rms_norm_eps, config.tie_word_embeddings = norms[0].eps * k / width, False
    ordinary = type(net)(config).to(net.dtype)  # type: ignore[call-arg]
    values = net.state_dict()
    for name, parameter in ordinary.named_parameters():
        if name in values:
            parameter.zero_()[tuple(map(slice, values[name].shape))] = values[name]
        else:
            parameter.fill_((k / width) ** 0.5)  # a norm
    if net.can_generate():
        ordinary.generation_config = net.generation_config
    return ordinary.eval()


# ------------------------------------------------------------------------------------------------ stream


def _fuse_stream(net: PreTrainedModel, parts: Layout, sites: list[_Site]) -> None:
    """Narrow the norms and what passes between them, the embeddings, and what reads the last states."""
    written = {block.writes: sites[block.reads] for block in parts.blocks}
    for i, (place, site) in enumerate(zip(parts.sites, sites, strict=True)):
        after = parts.sites[i + 1] if i + 1 < len(sites) else None
        room = sites[i + 1].width if after and after.stack == place.stack and not parts.before else 0
        before = written.get(i) if not parts.before else None
        for name in place.norms:
            new = NarrowNorm(before.width if before else 0, site.width, room, site.eps, site.padded)
            if before:
                fill(new, weight=site.write @ before.read, bias=site.write @ before.beta + site.shift)
            replace(net, name, new)
        for number, name in enumerate(place.tables):
            _fuse_table(net, name, site, site.shift if number == 0 else torch.zeros_like(site.shift))
    for block in parts.ends:
        weight = net.get_submodule(block.junction).weight.double()  # type: ignore[operator]
        kept = sites[block.reads].write.ne(0).any(0)
        replace(net, block.junction, SizedLinear.from_tensors((sites[block.writes].write @ weight)[:, kept], None))
    replace(net, parts.reader, _reader(net, parts.reader, sites[-1]))
    net.config.tie_word_embeddings = False  # what reads the last states has another basis than the embeddings
    shared = f"{base_prefix(net)}shared"
    if has(net, shared):  # BART's; its two stacks have tables of their own now
        replace(net, shared, SizedEmbedding(net.config.vocab_size, 0))


def _fuse_table(net: PreTrainedModel, name: str, site: _Site, shift: Tensor) -> None:
    """Narrow one table of embeddings; what its class does besides, it still does."""
    table: nn.Embedding = net.get_submodule(name)  # type: ignore[assignment]
    weight = table.weight.double() @ site.write.mT + shift / getattr(table, "embed_scale", 1.0)
    if type(table) is nn.Embedding:
        table = SizedEmbedding(*weight.shape)  # type: ignore[assignment]
        replace(net, name, table)
    else:
        StreamTable.adopt(table, site.width)
    fill(table, weight=weight)


def _reader(net: PreTrainedModel, name: str, site: _Site) -> NarrowLinear:
    """Return the Linear ``name``, without gates, reading from ``site``."""
    weight, bias = plain(net.get_submodule(name))
    return _narrow(weight @ site.read, _moved(weight, bias, site))


def _moved(weight: Tensor, bias: Tensor | None, site: _Site) -> Tensor | None:
    """Return the bias of a Linear that reads from ``site``."""
    if bias is None:
        return weight @ site.beta if site.beta.any() else None
    return weight @ site.beta + bias


def _writer(weight: Tensor, bias: Tensor | None, site: _Site, **places: int | str) -> NarrowLinear:
    """Return a Linear that writes to ``site``."""
    return _narrow(site.write @ weight, None if bias is None else site.write @ bias, **places)


# ------------------------------------------------------------------------------------------------ blocks


def _gate(values: Tensor | None, size: int) -> Tensor:
    return torch.ones(size).double() if values is None else values.double()


def _fuse_attention(net: PreTrainedModel, block: Block, sites: list[_Site], lead: int) -> None:
    q, v, o = (net.get_submodule(block.linears[role]) for role in "qvo")
    heads, d, alive = q.heads, q.out_features, _gate(o.z_out, 1)  # type: ignore
    z_q = _gate(q.z_out, d).view(heads, -1)  # type: ignore
    z_v = alive.ne(0) * _gate(v.z_out, d).view(heads, -1)  # type: ignore
    used = z_v.gt(0).any(1)  # heads; then the directions, the same in each of them
    in_scores, in_values = z_q.gt(0).any(0), z_v.gt(0).any(0)

    def rows(role: str, directions: Tensor, z: Tensor) -> None:
        layer, site = net.get_submodule(block.linears[role]), sites[block.roles[role]]
        weight, bias = plain(layer)
        bias = _moved(weight, bias, site)
        picked, z = (used[:, None] & directions).flatten(), z.flatten()
        weight, bias = (z[:, None] * (weight @ site.read))[picked], None if bias is None else (z * bias)[picked]
        new = _narrow(weight, bias, side="out", heads=int(used.sum()), head_width=d // heads)
        if hasattr(layer, "positions"):
            new.add_positions(layer.positions[:, picked])
        replace(net, block.linears[role], new)

    rows("q", in_scores, z_q)
    rows("k", in_scores, torch.ones_like(z_q))
    rows("v", in_values, z_v)
    weight, bias = plain(o)
    picked = (used[:, None] & in_values).flatten()
    bias = alive * (weight @ o.shift.double() + (0 if bias is None else bias))  # type: ignore
    weight = alive * (weight @ o.matrix().double()[:, picked])  # type: ignore
    new = _writer(weight, bias, sites[block.writes], lead=lead, side="in", heads=int(used.sum()), head_width=d // heads)
    replace(net, block.linears["o"], new)
    if change := head_attributes(net, d // heads, max(1, int(used.sum()))):
        set_attributes(net.get_submodule(block.linears["q"].rpartition(".")[0]), change)


@torch.no_grad()
def _take_positions(net: PreTrainedModel) -> Tensor | None:
    """Return DeBERTa's relative positions [rows, d], float64, and leave a table of no width in their place.

    Its attentions put them through the projections of queries and keys, whose inputs have another basis now: every
    attention gets products of its own (_fuse_positions), asked for with an input of no width.
    """
    if not getattr(net.config, "relative_attention", False):
        return None
    encoder = net.base_model.encoder
    positions = encoder.get_rel_embedding().double()
    encoder.rel_embeddings = SizedEmbedding(len(positions), 0)
    encoder.LayerNorm = Nothing("input")
    return positions


def _fuse_positions(net: PreTrainedModel, names: dict[str, str], positions: Tensor) -> None:
    """Note what a training form's queries and keys are of the relative positions, with gates, [rows, d]."""
    for role in "qk":
        layer = net.get_submodule(names[role])
        weight, bias = plain(layer)
        assert bias is not None
        layer.positions = _gate(layer.z_out, len(weight)) * (positions @ weight.mT + bias)  # type: ignore


def _fuse_ffn(net: PreTrainedModel, block: Block, sites: list[_Site], lead: int) -> None:
    down = net.get_submodule(block.linears["down"])
    alive = _gate(down.z_out, 1)  # type: ignore
    z = alive.ne(0) * _gate(down.z_in, down.in_features)  # type: ignore
    kept = z > 0
    for role, read in block.roles.items():
        new = _reader(net, block.linears[role], sites[read])
        replace(net, block.linears[role], _narrow(new.weight[kept], None if new.bias is None else new.bias[kept]))
    weight, bias = plain(down)
    weight, bias = alive * (weight * z)[:, kept], None if bias is None else alive * bias
    replace(net, block.linears["down"], _writer(weight, bias, sites[block.writes], lead=lead))


def _narrow(weight: Tensor, bias: Tensor | None, **places: int | str) -> NarrowLinear:
    layer = NarrowLinear(weight.shape[1], weight.shape[0], bias is not None, **places)  # type: ignore[arg-type]
    fill(layer, weight=weight, bias=bias)
    return layer


# ------------------------------------------------------------------------------------------------ widths


@torch.no_grad()
def round_widths(net: PreTrainedModel, multiple: int) -> PreTrainedModel:
    """Widen sites and feed-forward networks of a narrow ``net`` with zeros, in place; its outputs stay.

    RMSNorm divides by the wider width: that is taken back where its output is read. For PyTorch on a CPU with many
    tokens at once, where products of other widths take longer; not for one text, nor for ONNX Runtime.

    Args:
        net: in the form of :func:`fuse_projections`.
        multiple: what every width then divides by.

    Raises:
        UserError: ``multiple`` is below 1; the hidden states of ``net`` are not narrow.
    """
    if multiple < 1:
        raise UserError(f"export: --round_to {multiple} is below 1, the smallest valid value; usual: 8")
    if not any(isinstance(module, NarrowNorm) for module in net.modules()):
        raise UserError(
            f"export: --round_to {multiple} is for nets with narrow hidden states, SP3's; this one has none"
        )
    parts = layout(net, group_of(net))
    norms: list[list[NarrowNorm]] = [[net.get_submodule(n) for n in place.norms] for place in parts.sites]  # type: ignore[misc]
    widths = [own[0].features for own in norms]
    more = [-width % multiple for width in widths]
    scales = [1.0 if n.padded else (w / (w + m)) ** 0.5 for (n, *_), w, m in zip(norms, widths, more, strict=True)]
    written = {block.writes: block.reads for block in parts.blocks if not parts.before}

    def widen(name: str, rows: int = 0, columns: int = 0, scale: float = 1.0) -> nn.Module:
        """Pad a matrix, and the bias where rows are new."""
        layer = net.get_submodule(name)
        fill(layer, weight=nn.functional.pad(scale * layer.weight, (0, columns, 0, rows)))  # type: ignore[operator]
        if getattr(layer, "bias", None) is not None:
            fill(layer, bias=nn.functional.pad(layer.bias, (0, rows)))  # type: ignore[arg-type]
        if hasattr(layer, "out_features"):
            layer.out_features, layer.in_features = layer.weight.shape  # type: ignore[assignment]
        return layer

    for i, (place, own) in enumerate(zip(parts.sites, norms, strict=True)):
        for name in place.tables:
            widen(name, columns=more[i]).embedding_dim = widths[i] + more[i]  # type: ignore[assignment]
        for name, norm in zip(place.norms, own, strict=True):
            if (before := written.get(i)) is not None:
                widen(name, more[i], more[before], scales[before])
                norm.in_features = widths[before] + more[before]
            norm.features, norm.eps = widths[i] + more[i], norm.eps * (scales[i] ** 2)
            norm.room += more[i + 1] if norm.room else 0
    for block in parts.blocks:
        last: Any = net.get_submodule(block.linears[block.last])
        neurons = -last.in_features % multiple if block.part == "ffn" else 0
        for role, read in block.roles.items():
            widen(block.linears[role], neurons, more[read], scales[read])
        widen(block.linears[block.last], more[block.writes], neurons)
        last.lead += 0 if parts.before else more[block.reads]
    for block in parts.ends:
        widen(block.junction, more[block.writes], more[block.reads])
    widen(parts.reader, columns=more[-1], scale=scales[-1])
    return net
