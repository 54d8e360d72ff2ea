"""The shapes that projections leave, before any training: for SP3 the same share of all directions and neurons.

All heads and layers stay. SP3's training decides where directions go; hidden states stay widest where they begin. So
tables of embeddings are larger in the end than here, and the rest is smaller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lit_compress.layers import NarrowEmbedding, NarrowNorm, SizedEmbedding, SizedLinear, StreamBlock
from lit_compress.models.projected.gates import DIMENSIONS, ProjectionSpec
from lit_compress.models.record import parts_of
from lit_compress.models.residual_stream import has_head_projections
from lit_compress.models.sites import module_at
from lit_compress.models.surgery import replace
from lit_compress.numerics.gate_budget import Size
from lit_compress.numerics.search import largest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel


def even_units(size: Size, density: float) -> dict[str, Tensor]:
    """Return how many units every gate keeps, [groups], where all dimensions lose the same share."""

    def kept(share: float) -> dict[str, Tensor]:
        return {
            name: (share * units + torch.arange(groups) / groups).long().clamp(1, units)  # not all lose one at once
            if name in DIMENSIONS
            else torch.full((groups,), units)
            for name, (groups, units) in size.shapes.items()
        }

    return kept(largest(lambda share: size.count(kept(share)) <= density * size.total, 0.0, 1.0))


def narrow_table(net: PreTrainedModel, name: str, width: int) -> None:
    """Give a table of embeddings another width, without values; a subclass of nn.Embedding keeps its own forward."""
    table = module_at(net, name, nn.Embedding)
    if type(table) is nn.Embedding:
        replace(net, name, SizedEmbedding(table.num_embeddings, width))
    else:
        NarrowEmbedding.adopt(table, width)


def outline_projected(net: PreTrainedModel, form: ProjectionSpec, kept: Mapping[str, Tensor]) -> PreTrainedModel:
    """Give the dense ``net`` without values, in place, the sizes that folded projections leave; it cannot be run.

    Args:
        net: dense, without values.
        form: which gates there are.
        kept: how many units every gate keeps, [groups]: by :func:`even_units`, or by a rule.
    """
    stream = form.residual_stream(net)
    gated = "hidden" in form.gates
    widths = [net.config.hidden_size] * len(stream.sites)
    if gated:
        widths = kept["hidden"].tolist()
    turned = gated and stream.pre_norm  # then the biases of norms go into those of the Linears that read them
    shifts = {name: turned and getattr(net.get_submodule(name), "bias", None) is not None
              for place in stream.sites for name in place.norms}  # fmt: skip

    def put(name: str, inner: int, out: int, bias: bool) -> None:
        replace(net, name, SizedLinear(inner, out, bias))

    with torch.device("meta"):
        for kind, sublayers in (("attention", stream.attentions), ("ffn", stream.networks)):
            for i, sublayer in enumerate(sublayers):
                for role, name in sublayer.linears.items():
                    old = module_at(net, name, nn.Linear)
                    gate = "neurons" if kind == "ffn" else "qk" if role in "qk" else "vo"
                    own = gate in kept and (kind == "ffn" or has_head_projections(net))
                    last = role == sublayer.last
                    copies = len(parts_of(role)) if kind == "ffn" else net.config.num_attention_heads
                    units = int(kept[gate][i]) * copies if own else None
                    inner = (units or old.in_features) if last else widths[sublayer.roles[role]]
                    out = widths[sublayer.writes] if last else (units or old.out_features)
                    shifted = not last and shifts[sublayer.norm]
                    put(name, inner, out, old.bias is not None or shifted)
        if gated:
            for place, width in zip(stream.sites, widths, strict=True):
                for name in place.tables:
                    narrow_table(net, name, width)
            written = {sublayer.writes: widths[sublayer.reads] for sublayer in stream.sublayers}
            for i, place in enumerate(stream.sites):
                before = 0 if stream.pre_norm else written.get(i, 0)
                for name in place.norms:
                    replace(net, name, NarrowNorm(before, widths[i], 0, 1e-5, 0))
            for sublayer in stream.attentions if stream.pre_norm else ():
                StreamBlock.adopt(net.get_submodule(sublayer.host))  # counts the matrices between bases
            for sublayer in stream.group_ends:
                put(sublayer.junction, widths[sublayer.reads], widths[sublayer.writes], False)
            if stream.reader:
                reader = module_at(net, stream.reader, nn.Linear)
                shifted = shifts[stream.sites[-1].norms[-1]]
                put(stream.reader, widths[-1], reader.out_features, reader.bias is not None or shifted)
    return net
