"""SP3's training form (Hu et al. 2024): insert the projections into a model.

fold.py multiplies them together afterwards; models/residual_stream.py says which norms and sub-layers there are.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.layers import BasisChange, NarrowLinear, ProjectedLinear, ProjectedNorm, StreamBlock, StreamNorm
from lit_compress.models.architectures import get_architecture
from lit_compress.models.projected.gates import ProjectionSpec
from lit_compress.models.residual_stream import ResidualStream, has_head_projections, residual_stream
from lit_compress.models.sites import head_width, module_at, size_at
from lit_compress.models.surgery import fill, replace
from lit_compress.numerics.pca import site_projections
from lit_compress.utils.devices import move

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def identity_bases(net: PreTrainedModel, group: int = 1) -> Bases:
    """Return identity matrices as projections (the paper's Table 3 without PCA)."""
    stream, heads = residual_stream(net, group), net.config.num_attention_heads
    one, small = (torch.eye(size).double() for size in (net.config.hidden_size, head_width(net, "encoder")))
    count = len(stream.attentions) * has_head_projections(net)
    return Bases([one] * len(stream.rotatable), *([small.expand(heads, -1, -1)] * count for _ in range(3)))


@torch.no_grad()
def insert_projections(net: PreTrainedModel, bases: Bases, form: ProjectionSpec = ProjectionSpec()) -> PreTrainedModel:
    """Put projections and open gates into the dense ``net``, in place; its outputs stay the same. Return ``net``.

    Without a gate on the hidden states, the norms are not changed.

    Raises:
        UserError: the architecture of ``net`` cannot have them.
    """
    stream, heads, dtype, named = form.residual_stream(net), net.config.num_attention_heads, net.dtype, form.gates
    if "hidden" in form.gates:
        (_turn if stream.pre_norm else _project_norms)(net, stream, bases.sites)
    if has_head_projections(net):
        for sublayer, query, key, value in zip(stream.attentions, bases.query, bases.key, bases.value, strict=True):
            d, _ = size_at(net, sublayer.linears["q"])
            gates_v = d * ("vo" in named or "heads" in named)
            for role, projection, side, gates in (
                ("q", query, "out", d * ("qk" in named)),
                ("k", key, "out", 0),
                ("v", value, "out", gates_v),
                ("o", value.mT, "in", int("attention_layer" in named)),
            ):
                matrix = torch.block_diag(*projection) if form.heads == "dense" else projection
                _put(net, sublayer.linears[role], matrix, side, heads, 0, gates, form.heads)
    for sublayer in stream.networks:
        neurons = size_at(net, sublayer.linears["down"])[1] * ("neurons" in form.gates)
        _put(net, sublayer.linears["down"], None, None, 1, neurons, int("ffn_layer" in form.gates))
    return move(net, dtype).train(net.training)


def _put(net: PreTrainedModel, name: str, projection: Tensor | None, *sizes: Any) -> None:
    """Replace a Linear by one with a projection and gates."""
    old: Any = net.get_submodule(name)
    new = ProjectedLinear(old.in_features, old.out_features, old.bias is not None, *sizes)
    fill(new, weight=old.weight, bias=old.bias, projection=projection)
    replace(net, name, new)


def _project_norms(net: PreTrainedModel, stream: ResidualStream, axes: Sequence[Tensor]) -> None:
    """Replace LayerNorms after residual sums by projections (post-norm models)."""
    for place, u in zip(stream.sites, axes, strict=True):
        old = module_at(net, place.norms[0], nn.LayerNorm)
        p_in, p_out = site_projections(u, old.weight)
        site = ProjectedNorm(old.weight.numel(), old.eps)
        fill(site, p_in=p_in, p_out=p_out, bias=old.bias)
        replace(net, place.norms[0], site)


def _turn(net: PreTrainedModel, stream: ResidualStream, axes: Sequence[Tensor]) -> None:
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
            _absorb(net, sublayer.linears[role], norms[sublayer.norm], axes[sublayer.reads])
        last, write = net.get_submodule(sublayer.linears[sublayer.last]), writes[sublayer.writes]
        weight, bias = plain(last)
        fill(last, weight=write @ weight, bias=None if bias is None else write @ bias)
        if sublayer.kind == "attention":
            StreamBlock.adopt(net.get_submodule(sublayer.host))
    for sublayer in stream.group_ends:
        junction = BasisChange(net.config.hidden_size)
        fill(junction, weight=axes[sublayer.writes].mT @ axes[sublayer.reads])
        replace(net, sublayer.junction, junction)
    _absorb(net, stream.reader, norms[stream.sites[-1].norms[-1]], axes[-1])
    net.config.tie_word_embeddings = False
    for name, norm in norms.items():
        replace(net, name, StreamNorm(net.config.hidden_size, getattr(norm, "eps", None) or norm.variance_epsilon))


def _absorb(net: PreTrainedModel, name: str, norm: nn.Module, axes: Tensor) -> None:
    """Multiply weight and bias of ``norm`` and the basis ``axes`` into a Linear, which then reads rms(x)."""
    weight, bias = plain(net.get_submodule(name))
    gamma, beta = (getattr(norm, kind, None) for kind in ("weight", "bias"))
    if beta is not None:
        bias = weight @ beta.double() + (0 if bias is None else bias)
    new = NarrowLinear(weight.shape[1], weight.shape[0], bias is not None)
    fill(new, weight=(weight if gamma is None else weight * gamma.double()) @ axes, bias=bias)
    replace(net, name, new)


def plain(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a Linear, multiplied by the projection of its outputs if it has one, in float64."""
    weight, bias = layer.weight.double(), None if layer.bias is None else layer.bias.double()
    if getattr(layer, "side", None) == "out":
        projection, shift = (tensor.double() for tensor in layer.projected())
        weight, bias = projection @ weight, shift if bias is None else projection @ bias + shift
    return weight, bias
