"""SP3's gates: which there are, which modules they multiply, and the shapes that they leave."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.models.accounting import dense_site_params
from lit_compress.models.record import parts_of
from lit_compress.models.residual_stream import ResidualStream, has_head_projections, residual_stream
from lit_compress.models.sites import Model, head_width, size_at
from lit_compress.numerics.hard_concrete import Size, Weights
from lit_compress.numerics.search import largest
from lit_compress.utils.errors import UserError

GATES = ("hidden", "qk", "vo", "neurons", "heads", "attention_layer", "ffn_layer")
DIMENSIONS = GATES[:4]  # the others are whole heads and layers


def possible_gates(net: Model) -> tuple[str, ...]:
    """Return the gates that ``net`` can have, which is dense or in training form.

    Raises:
        UserError: its architecture cannot have projections.
    """
    stream = residual_stream(net)
    if stream.pre_norm and not stream.reader:
        raise UserError(
            f"model.backbone: sp3 changes the basis of the last hidden states of {net.config.model_type}, for "
            "which this task asks; nearest: a model whose norms are after the sub-layers, or LPAF"
        )
    names = GATES if has_head_projections(net) else ("hidden", "neurons")
    return tuple(name for name in names if name != "hidden" or not stream.fixed)


def gate_shapes(net: Model, gates: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return name of a gate -> (groups, units); groups are sites, attentions or networks."""
    shapes = _shapes(net, residual_stream(net))
    return {name: shapes[name] for name in gates}


def _shapes(net: Model, stream: ResidualStream) -> dict[str, tuple[int, int]]:
    """Return name of a gate -> (groups, units) for all gates, used or not."""
    attentions, networks, wide = len(stream.attentions), len(stream.networks), head_width(net, "encoder")
    _, neurons = size_at(net, stream.networks[0].sites["down"])
    return {
        "hidden": (len(stream.sites), net.config.hidden_size), "qk": (attentions, wide), "vo": (attentions, wide),
        "neurons": (networks, neurons), "heads": (attentions, net.config.num_attention_heads),
        "attention_layer": (attentions, 1), "ffn_layer": (networks, 1),
    }  # fmt: skip


def gated_size(net: Model, gates: Collection[str]) -> Size:
    """Return the sizes of the matrices between the sites, W_R included, as products of kept units (Appendix C, Eq. 30).

    The printed sum of W_R runs over one index; a matrix has the product of both sides. A density is a fraction of the
    dense model's matrices, which have no W_R. All units without a gate stay. ``net`` is dense or in training form.
    """
    stream = residual_stream(net)
    every = _shapes(net, stream)

    def weights(number: int, *units: tuple[str, int]) -> Weights:
        number *= math.prod(every[name][1] for name, _ in units if name not in gates)
        return number, *(unit for unit in units if unit[0] in gates)

    products = list[Weights]()
    for i, sublayer in enumerate(stream.attentions):
        whole = (("attention_layer", i), ("heads", i))
        for role, read in (*sublayer.roles.items(), ("o", sublayer.writes)):
            if has_head_projections(net):
                inner = ("qk" if role in "qk" else "vo", i)
                products.append(weights(1, ("hidden", read), inner, *whole))
            else:
                products.append(weights(size_at(net, sublayer.sites[role])[role == "o"], ("hidden", read)))
    for i, sublayer in enumerate(stream.networks):
        for role, read in (*sublayer.roles.items(), ("down", sublayer.writes)):
            products.append(weights(len(parts_of(role)), ("hidden", read), ("ffn_layer", i), ("neurons", i)))
    if "hidden" in gates:
        changes = [sublayer for sublayer in stream.sublayers if sublayer.reads != sublayer.writes]
        products += [weights(1, ("hidden", each.reads), ("hidden", each.writes)) for each in changes]
    return Size(products, gate_shapes(net, gates), dense_site_params(net))


def even_units(size: Size, density: float) -> dict[str, Tensor]:
    """Return how many units every gate keeps, [groups], where all dimensions lose the same share.

    All heads and layers stay. SP3's training decides where directions go; hidden states stay widest where they begin.
    So tables of embeddings are larger in the end than here, and the rest is smaller.
    """

    def kept(share: float) -> dict[str, Tensor]:
        return {
            name: (share * units + torch.arange(groups) / groups).long().clamp(1, units)  # not all lose one at once
            if name in DIMENSIONS
            else torch.full((groups,), units)
            for name, (groups, units) in size.shapes.items()
        }

    return kept(largest(lambda share: size.count(kept(share)) <= density * size.total, 0.0, 1.0))


class GateSlots:
    """The modules of a model in training form that the gates multiply."""

    def __init__(self, net: Model, gates: Collection[str]) -> None:
        stream = residual_stream(net)
        self.sites: list[list[nn.Module]] = []
        for i, place in enumerate(stream.sites if "hidden" in gates else ()):
            ends = [sublayer.junction for sublayer in stream.turns if sublayer.reads == i]
            self.sites.append([net.get_submodule(name) for name in (*place.norms, *ends)])
        self.attentions, self.networks = (
            [{role: net.get_submodule(name) for role, name in sublayer.sites.items()} for sublayer in blocks]
            for blocks in (stream.attentions, stream.networks)
        )

    def set(self, z: Mapping[str, Tensor]) -> None:
        """Set the values [groups, units] of every gate, by name; ``qk`` and ``vo`` have units of every head."""
        for modules, values in zip(self.sites, z.get("hidden", ()), strict=True):
            for module in modules:
                module.z = values
        z = dict(z)
        if "heads" in z and self.attentions:
            v: Any = self.attentions[0]["v"]
            heads = z["heads"].repeat_interleave(v.out_features // v.heads, 1)
            z["vo"] = heads * z["vo"] if "vo" in z else heads
        for name, sublayers, role, gate in (
            ("qk", self.attentions, "q", "z_out"), ("vo", self.attentions, "v", "z_out"),
            ("attention_layer", self.attentions, "o", "z_out"), ("neurons", self.networks, "down", "z_in"),
            ("ffn_layer", self.networks, "down", "z_out"),
        ):  # fmt: skip
            for sublayer, values in zip(sublayers, z.get(name, ()), strict=name in z):
                setattr(sublayer[role], gate, values)
