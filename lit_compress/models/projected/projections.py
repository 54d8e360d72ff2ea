"""SP3's training form (Hu et al. 2024): put projections into a model, and multiply them into smaller matrices later.

models/residual_stream.py says which norms and sub-layers there are.

Norms after the residual sum (BERT, BART, ...) become pairs of projections with gates between (numerics/pca.py). Norms
before the blocks (OPT, Llama, Qwen3) leave the stream unchanged, so it is the stream that changes its basis, in the
weights around it: with U of the site a norm reads, R the removal of the mean where it is a LayerNorm,

    readers:     W diag(gamma) U,  b + W beta       writers:        U'^T R W,  U'^T R b
    embeddings:  E R U                              between bases:  x -> U'^T U (z * x)
    norm:        z * rms(z * x), over the original width

The gates multiply the input of each reader, so closed directions of the stream need not be zero. That form has no
projections to train, so its matrices are trained. Before rotary embeddings and norms of heads queries and keys cannot
be projected, nor heads of shared keys taken out: Llama and Qwen3 have gates of hidden states and neurons. ModernBERT's
first attention reads the embeddings without a norm: it has gates of neurons alone. ALBERT's blocks read the embeddings
first, then their output: there, and where embeddings have another width, hidden states keep their basis and have no
gates.

With the gates z of a site and its projections, the matrices between two sites become (Eqs. 15-18), in float64 (the
paper swaps M and F in Eq. 15):

    A = diag(z) P_in restricted to the rows with z > 0,  a = z * shift        multiply what is written to the site
    B = P_out diag(z) restricted to those columns,  beta                      multiply what is read from it
    W_R = A' B,  W_Q = z_qk P_Q W_Q B,  W_O = z_MHA A' W_O P_O,  W_U = W_U[kept] B,  W_D = z_FFN A' W_D z_f

The shift ``a`` enters once: in the bias of W_R, which the site's norm applies. RMSNorm over k kept directions divides
by k; the original width d stays the divisor: eps d / k, and sqrt(d / k) in B. In pre-norm models P_in and P_out are in
the weights already, and there is a W_R only where the basis changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_compress.layers import (
    BasisChange,
    NarrowEmbedding,
    NarrowLinear,
    NarrowNorm,
    ProjectedLinear,
    ProjectedNorm,
    SizedEmbedding,
    SizedLinear,
    StreamBlock,
    StreamNorm,
)
from lit_compress.models.architectures import get_architecture
from lit_compress.models.projected.gates import GateSlots, gate_shapes
from lit_compress.models.record import parts_of
from lit_compress.models.residual_stream import (
    ResidualStream,
    StreamSubLayer,
    has_head_projections,
    residual_stream,
)
from lit_compress.models.sites import Model, base_prefix, has, head_width, module_at, size_at
from lit_compress.models.surgery import fill, link, replace, tell_heads
from lit_compress.numerics.pca import site_projections
from lit_compress.utils.devices import move


@dataclass(frozen=True)
class Bases:
    """The projections of a model, float64.

    Attributes:
        sites: U [d, d] of every site of the residual stream that can have one.
        query, key, value: P_Q, P_K, P_V = P_O^T [heads, d_h, d_h] of every attention; empty where heads cannot be
            projected.
    """

    sites: Sequence[Tensor]
    query: Sequence[Tensor]
    key: Sequence[Tensor]
    value: Sequence[Tensor]


def identity_bases(net: Model) -> Bases:
    """Return identity matrices as projections."""
    stream, heads = residual_stream(net), net.config.num_attention_heads
    sizes = (net.config.hidden_size, head_width(net, "encoder"))
    one, small = (torch.eye(size, device=net.device).double() for size in sizes)
    count = len(stream.attentions) * has_head_projections(net)
    return Bases([one] * len(stream.rotatable), *([small.expand(heads, -1, -1)] * count for _ in range(3)))


@torch.no_grad()
def insert_projections(net: Model, bases: Bases, named: Collection[str]) -> Model:
    """Put projections and open gates into the dense ``net``, in place; its outputs stay the same. Return ``net``.

    The gates have the names ``named``. Without one on the hidden states, the norms are not changed.
    """
    stream, heads, dtype = residual_stream(net), net.config.num_attention_heads, net.dtype
    if "hidden" in named:
        (_turn if stream.pre_norm else _project_norms)(net, stream, bases.sites)
    if has_head_projections(net):
        for sublayer, query, key, value in zip(stream.attentions, bases.query, bases.key, bases.value, strict=True):
            d, _ = size_at(net, sublayer.sites["q"])
            gates_v = d * ("vo" in named or "heads" in named)
            for role, projection, side, gates in (
                ("q", query, "out", d * ("qk" in named)),
                ("k", key, "out", 0),
                ("v", value, "out", gates_v),
                ("o", value.mT, "in", int("attention_layer" in named)),
            ):
                _put(net, sublayer.sites[role], torch.block_diag(*projection), side, heads, 0, gates)
    for sublayer in stream.networks:
        neurons = size_at(net, sublayer.sites["down"])[1] * ("neurons" in named)
        _put(net, sublayer.sites["down"], None, None, 1, neurons, int("ffn_layer" in named))
    return move(net, dtype).train(net.training)


def _put(net: Model, name: str, projection: Tensor | None, *sizes: Any) -> None:
    """Replace a Linear by one with a projection and gates."""
    old: Any = net.get_submodule(name)
    new = ProjectedLinear(old.in_features, old.out_features, old.bias is not None, *sizes)
    fill(new, weight=old.weight, bias=old.bias, projection=projection)
    replace(net, name, new)


def _project_norms(net: Model, stream: ResidualStream, axes: Sequence[Tensor]) -> None:
    """Replace LayerNorms after residual sums by projections (post-norm models)."""
    for place, u in zip(stream.sites, axes, strict=True):
        old = module_at(net, place.norms[0], nn.LayerNorm)
        p_in, p_out = site_projections(u, old.weight)
        site = ProjectedNorm(old.weight.numel(), old.eps)
        fill(site, p_in=p_in, p_out=p_out, bias=old.bias)
        replace(net, place.norms[0], site)


def _turn(net: Model, stream: ResidualStream, axes: Sequence[Tensor]) -> None:
    """Change the basis of the residual stream to ``axes``, U [d, d] of each site (pre-norm models)."""
    norms: dict[str, Any] = {name: net.get_submodule(name) for place in stream.sites for name in place.norms}
    centred = not get_architecture(net).rms
    writes = [u.mT - u.mean(0)[:, None] if centred else u.mT for u in axes]  # U^T R
    for place in stream.sites:
        for name in place.tables:
            table = module_at(net, name, nn.Embedding)
            fill(table, weight=table.weight.double() @ writes[0].mT)
    for sublayer in stream.sublayers:
        for role in sublayer.roles:
            _absorb(net, sublayer.sites[role], norms[sublayer.norm], axes[sublayer.reads])
        last, write = net.get_submodule(sublayer.last), writes[sublayer.writes]
        weight, bias = plain(last)
        fill(last, weight=write @ weight, bias=None if bias is None else write @ bias)
        if sublayer.kind == "attention":
            StreamBlock.adopt(net.get_submodule(sublayer.block))
    for sublayer in stream.turns:
        junction = BasisChange(net.config.hidden_size)
        fill(junction, weight=axes[sublayer.writes].mT @ axes[sublayer.reads])
        replace(net, sublayer.junction, junction)
    _absorb(net, stream.reader, norms[stream.sites[-1].norms[-1]], axes[-1])
    net.config.tie_word_embeddings = False
    for name, norm in norms.items():
        replace(net, name, StreamNorm(net.config.hidden_size, getattr(norm, "eps", None) or norm.variance_epsilon))


def _absorb(net: Model, name: str, norm: nn.Module, axes: Tensor) -> None:
    """Multiply weight and bias of ``norm`` and the basis ``axes`` into a Linear, which then reads rms(x)."""
    weight, bias = plain(net.get_submodule(name))
    gamma, beta = (getattr(norm, kind, None) for kind in ("weight", "bias"))
    if beta is not None:
        bias = weight @ beta.double() + (0 if bias is None else bias)
    replace(net, name, _narrow((weight if gamma is None else weight * gamma.double()) @ axes, bias))


def plain(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a Linear, multiplied by the projection of its outputs if it has one, in float64."""
    weight, bias = layer.weight.double(), None if layer.bias is None else layer.bias.double()
    if getattr(layer, "side", None) == "out":
        projection, shift = layer.projection.double(), layer.shift.double()
        weight, bias = projection @ weight, shift if bias is None else projection @ bias + shift
    return weight, bias


class _Site(NamedTuple):
    """The matrices of one site for folding: A (write), a (shift), B (read), beta, which directions stay, norm's eps."""

    write: Tensor
    shift: Tensor
    read: Tensor
    beta: Tensor | None
    kept: Tensor
    eps: float


def _site(module: StreamNorm) -> _Site:
    d, kept, beta = module.features, module.z > 0, None
    ratio = d / int(kept.sum())
    if isinstance(module, ProjectedNorm):
        p_in, p_out, shift, beta = (p.detach().double() for p in (module.p_in, module.p_out, module.shift, module.bias))
    else:
        p_in = p_out = torch.eye(d).double()
        shift = torch.zeros(d).double()
    z = module.z.to(p_in)
    read = p_out[:, kept] * z[kept] * ratio**0.5
    return _Site(z[kept, None] * p_in[kept], (z * shift)[kept], read, beta, kept, module.eps * ratio)


@torch.no_grad()
def fold_projections(net: Model) -> Model:
    """Multiply projections and gates of ``net`` into smaller matrices, in place; return ``net``.

    The outputs in evaluation mode stay the same.
    """
    dtype, stream = net.dtype, residual_stream(net)
    norms = [net.get_submodule(place.norms[0]) for place in stream.sites]
    if sites := [_site(norm) for norm in norms if isinstance(norm, StreamNorm)]:
        _fuse_stream(net, stream, sites)
    else:
        d = net.config.hidden_size
        one, zero = torch.eye(d).double(), torch.zeros(d).double()
        sites = [_Site(one, zero, one, None, zero, 0.0)] * len(stream.sites)
    for sublayer in stream.sublayers:
        lead = len(sites[sublayer.reads].write) if isinstance(norms[0], ProjectedNorm) else 0
        if sublayer.kind == "ffn":
            _fuse_ffn(net, sublayer, sites, lead)
        elif has_head_projections(net):
            _fuse_attention(net, sublayer, sites, lead)
        else:
            for role, read in sublayer.roles.items():
                name = sublayer.sites[role]
                replace(net, name, _narrow(*_read(net, name, sites[read])))
            _write(net, sublayer, *plain(net.get_submodule(sublayer.last)), sites)
    return move(net, dtype)


def narrowed(net: Model, gates: Collection[str], kept: Mapping[str, Tensor], bases: Bases) -> Model:
    """Give the dense ``net``, in place, the projections ``bases`` and the first of their directions, and fold them.

    ``kept`` is how many units every gate keeps, [groups]. The model may be without values.
    """
    heads, z = net.config.num_attention_heads, dict[str, Tensor]()
    for name, (_, units) in gate_shapes(net, gates).items():
        values = (torch.arange(units) < kept[name][:, None]).to(net.dtype)
        z[name] = values.repeat(1, heads) if name in ("qk", "vo") else values
    with net.device:
        insert_projections(net, bases, gates)
        GateSlots(net, gates).set(z)
        return link(fold_projections(net))  # as a checkpoint rebuilds it


def _fuse_stream(net: Model, stream: ResidualStream, sites: list[_Site]) -> None:
    """Fold norms, residual matrices W_R, embeddings, and the layer that reads the last hidden states."""
    written = {sublayer.writes: sites[sublayer.reads] for sublayer in stream.sublayers}
    for i, (place, site) in enumerate(zip(stream.sites, sites, strict=True)):
        after = stream.sites[i + 1] if i + 1 < len(sites) else None
        room = len(sites[i + 1].write) if after and after.stack == place.stack and not stream.pre_norm else 0
        before = written.get(i) if not stream.pre_norm else None
        for name in place.norms:
            new = NarrowNorm(len(before.write) if before else 0, len(site.write), room, site.eps)
            if before:
                fill(new, weight=site.write @ before.read, bias=_moved(site.write, site.shift, before))
            replace(net, name, new)
        for number, name in enumerate(place.tables):
            table = module_at(net, name, nn.Embedding)
            shift = site.shift if number == 0 else torch.zeros_like(site.shift)
            weight = table.weight.double() @ site.write.mT + shift / getattr(table, "embed_scale", 1.0)
            if type(table) is nn.Embedding:
                replace(net, name, SizedEmbedding(table.num_embeddings, len(site.write)))
            else:  # keeps a forward of its own
                NarrowEmbedding.adopt(table, len(site.write))
            fill(net.get_submodule(name), weight=weight)
    for sublayer in stream.turns:
        weight = module_at(net, sublayer.junction, BasisChange).weight.double()
        turned = (sites[sublayer.writes].write @ weight)[:, sites[sublayer.reads].kept]
        replace(net, sublayer.junction, SizedLinear.from_tensors(turned, None))
    if stream.reader:
        replace(net, stream.reader, _narrow(*_read(net, stream.reader, sites[-1])))
    net.config.tie_word_embeddings = False  # the output layer has another basis than the embeddings
    shared = f"{base_prefix(net)}shared"
    if has(net, shared):  # BART's; encoder and decoder have tables of their own now
        replace(net, shared, SizedEmbedding(net.config.vocab_size, 0))


def _read(net: Model, name: str, site: _Site) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the folded Linear ``name``, which reads from ``site``, without its gates."""
    weight, bias = plain(net.get_submodule(name))
    return weight @ site.read, _moved(weight, bias, site)


def _moved(weight: Tensor, bias: Tensor | None, site: _Site) -> Tensor | None:
    """Return the bias of a folded Linear that reads from ``site``."""
    return bias if site.beta is None else weight @ site.beta + (0 if bias is None else bias)


def _write(
    net: Model, sublayer: StreamSubLayer, weight: Tensor, bias: Tensor | None, sites: list[_Site], **places: Any
) -> None:
    """Replace the last Linear of a sub-layer by the folded one, with its values before they are written to the site."""
    write = sites[sublayer.writes].write
    replace(net, sublayer.last, _narrow(write @ weight, None if bias is None else write @ bias, **places))


def _gate(values: Tensor | None, size: int) -> Tensor:
    """Return the values of gates, which a model without values has too; 1 for none."""
    return torch.ones(size, device="cpu").double() if values is None else values.double()


def _fuse_attention(net: Model, sublayer: StreamSubLayer, sites: list[_Site], lead: int) -> None:
    q, v, o = (module_at(net, sublayer.sites[role], ProjectedLinear) for role in "qvo")
    heads, d, alive = q.heads, q.out_features, _gate(o.z_out, 1)
    z_q = _gate(q.z_out, d).view(heads, -1)
    z_v = alive.ne(0) * _gate(v.z_out, d).view(heads, -1)
    used = z_v.gt(0).any(1)  # heads with an open direction; below, directions open in any head
    in_scores, in_values = z_q.gt(0).any(0), z_v.gt(0).any(0)
    of_heads = {"heads": int(used.sum()), "head_width": d // heads}

    def rows(role: str, directions: Tensor, z: Tensor) -> None:
        read, bias = _read(net, sublayer.sites[role], sites[sublayer.roles[role]])
        picked, z = (used[:, None] & directions).flatten(), z.flatten().to(read.device)
        bias = None if bias is None else (z * bias)[picked]
        replace(net, sublayer.sites[role], _narrow((z[:, None] * read)[picked], bias, side="out", **of_heads))

    rows("q", in_scores, z_q)
    rows("k", in_scores, torch.ones_like(z_q))
    rows("v", in_values, z_v)
    weight, bias = plain(o)
    picked, alive = (used[:, None] & in_values).flatten(), alive.to(weight)
    assert o.projection is not None and o.shift is not None
    bias = alive * (weight @ o.shift.double() + (0 if bias is None else bias))
    weight = alive * (weight @ o.projection.double()[:, picked])
    _write(net, sublayer, weight, bias, sites, lead=lead, side="in", **of_heads)
    left = used.nonzero().flatten().tolist() or [0]
    tell_heads(net, sublayer.sites["q"].rpartition(".")[0], d // heads, left)


def _fuse_ffn(net: Model, sublayer: StreamSubLayer, sites: list[_Site], lead: int) -> None:
    down = module_at(net, sublayer.sites["down"], ProjectedLinear)
    alive = _gate(down.z_out, 1)
    z = alive.ne(0) * _gate(down.z_in, down.in_features)
    kept = z > 0
    for role, read in sublayer.roles.items():
        own, bias = _read(net, sublayer.sites[role], sites[read])
        rows = kept.repeat(len(parts_of(role)))
        replace(net, sublayer.sites[role], _narrow(own[rows], None if bias is None else bias[rows]))
    weight, bias = plain(down)
    alive, z = alive.to(weight), z.to(weight)
    weight, bias = alive * (weight * z)[:, kept], None if bias is None else alive * bias
    _write(net, sublayer, weight, bias, sites, lead=lead)


def _narrow(weight: Tensor, bias: Tensor | None, **places: Any) -> NarrowLinear:
    layer = NarrowLinear(weight.shape[1], weight.shape[0], bias is not None, **places)
    fill(layer, weight=weight, bias=bias)
    return layer
