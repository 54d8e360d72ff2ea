"""CoFi's gates in a net: which there are, what they count, where their values go.

Xia, Zhong, Chen 2022, Eqs. of section 3.1; places as in its Figure 2:

    attention, ffn     [sub-layers, 1]   output of the last matrix, bias too; at 0 the LayerNorm after it is skipped
    heads              [attentions, H]   what a head gives to the output matrix
    neurons            [ffns, f]         what a neuron gives to the second matrix
    hidden             [1, d]            the residual stream: embeddings, outputs of sub-layers, LayerNorms
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_compress.families import base_prefix
from lit_compress.gates import Size, Weights
from lit_compress.layers import GatedLinear, GatedNorm
from lit_compress.sublayers import SubLayer, get_anatomy, sublayers
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Gate = Literal["attention", "ffn", "heads", "neurons", "hidden"]
_UNITS = {"attention": "heads", "ffn": "neurons"}


def possible_gates(net: PreTrainedModel) -> tuple[Gate, ...]:
    """Return the gates that the family of ``net`` can have."""
    gates: tuple[Gate, ...] = ("attention", "ffn", "heads", "neurons")
    return (*gates, "hidden") if get_anatomy(net).residual else gates


def of_kind(parts: list[SubLayer], kind: str) -> list[SubLayer]:
    """Return the attentions or the feed-forward networks, in order: the groups of their gates."""
    return [part for part in parts if part.kind == kind]


def gate_shapes(net: PreTrainedModel, gates: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return name of a gate -> (groups, size) of the dense ``net``."""
    parts = sublayers(net)
    attentions, ffns = of_kind(parts, "attention"), of_kind(parts, "ffn")
    shapes = {
        "attention": (len(attentions), 1),
        "ffn": (len(ffns), 1),
        "heads": (len(attentions), attentions[0].heads),
        "neurons": (len(ffns), net.get_submodule(ffns[0].sites["down"]).in_features),
        "hidden": (1, net.config.hidden_size),
    }
    return {name: shape for name, shape in shapes.items() if name in gates}


def counted(net: PreTrainedModel, gates: Collection[str]) -> Size:
    """Return what is counted of the dense ``net``: the weights of the sites, without biases."""
    shapes, weights = gate_shapes(net, gates), []
    parts, width = sublayers(net), net.config.hidden_size
    for kind, unit in _UNITS.items():
        for group, part in enumerate(of_kind(parts, kind)):
            number = sum(net.get_submodule(name).weight.numel() for name in part.sites.values())
            factors = []
            units = part.heads if kind == "attention" else net.get_submodule(part.sites["down"]).in_features
            for name, size in ((kind, 1), (unit, units), ("hidden", width)):
                if name in gates:
                    factors.append((name, 0 if name == "hidden" else group))
                    number //= size
            weights.append(Weights(number, *factors))
    return Size(weights, shapes)


def least_units(gates: Collection[str]) -> dict[str, int]:
    """Return how many units a group keeps in any case: one in a sub-layer that cannot be closed, and of the stream."""
    needed = {unit: kind not in gates for kind, unit in _UNITS.items()}
    return {name: int(needed.get(name, name == "hidden")) for name in gates}


def gate_net(net: PreTrainedModel, gates: Collection[str]) -> None:
    """Put gated layers where ``gates`` act, in place; the values come with :func:`place`."""
    for part in sublayers(net):
        last = part.sites["o" if part.kind == "attention" else "down"]
        if {part.kind, _UNITS[part.kind], "hidden"} & set(gates):
            replace(net, last, GatedLinear(net.get_submodule(last)))
        if part.norm and {part.kind, "hidden"} & set(gates):
            replace(net, part.norm, GatedNorm(net.get_submodule(part.norm)))  # type: ignore[arg-type]
    if "hidden" in gates:
        name = _first_norm(net)
        replace(net, name, GatedNorm(net.get_submodule(name), first=True))  # type: ignore[arg-type]


def place(net: PreTrainedModel, z: dict[str, Tensor], settled: bool = False) -> None:
    """Give the gated layers of ``net`` their values for the next forwards.

    Args:
        net: with the layers of :func:`gate_net`.
        z: name of a gate -> values [groups, size].
        settled: they are not drawn, but what would be cut.
    """
    parts = sublayers(net)
    hidden = z["hidden"][0] if "hidden" in z else None
    share = float((hidden > 0).float().mean()) if settled and hidden is not None else 1.0
    for kind, unit in _UNITS.items():
        for group, part in enumerate(of_kind(parts, kind)):
            last: Any = net.get_submodule(part.sites["o" if kind == "attention" else "down"])
            if not isinstance(last, GatedLinear):
                continue
            layer = z[kind][group] if kind in z else None
            if unit in z:
                inputs = last.layer.in_features
                last.z_in = z[unit][group].repeat_interleave(inputs // z[unit].shape[1], output_size=inputs)
            if layer is not None or hidden is not None:
                last.z_out = hidden if layer is None else layer if hidden is None else layer * hidden
            if part.norm and isinstance(norm := net.get_submodule(part.norm), GatedNorm):
                norm.z, norm.z_layer, norm.share = hidden, layer, share
    if hidden is not None:
        first: Any = net.get_submodule(_first_norm(net))
        first.z, first.share = hidden, share


def _first_norm(net: PreTrainedModel) -> str:
    residual = get_anatomy(net).residual
    assert residual is not None
    return f"{base_prefix(net)}{residual.norm}"


@torch.no_grad()
def canonical(z: dict[str, Tensor]) -> dict[str, Tensor]:
    """Close sub-layers without units and units of closed sub-layers, so that what is evaluated is what is cut.

    A sub-layer whose units are all closed would still add its bias and be normalised. Twice is once.

    Args:
        z: name of a gate -> values [groups, size].
    """
    z = dict(z)
    for kind, unit in _UNITS.items():
        if kind in z and unit in z:
            z[kind] = z[kind] * (z[unit] > 0).any(1, keepdim=True)
            z[unit] = z[unit] * (z[kind] > 0)
    return z
