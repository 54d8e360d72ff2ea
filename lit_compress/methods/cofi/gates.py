"""CoFi's gates in a model: which there are, how many weights depend on them, which modules they multiply.

Xia, Zhong, Chen 2022, Eqs. of section 3.1; each gate [groups, size] multiplies, as in its Figure 2:

    attention_layer, ffn_layer   [sub-layers, 1]   output of the last matrix, bias too; at 0 the LayerNorm after it is
                                                   skipped
    heads                        [attentions, H]   a head's input to the output matrix
    neurons                      [ffns, f]         a neuron's input to the second matrix
    hidden                       [1, d]            the residual stream: embeddings, outputs of sub-layers, LayerNorms
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from torch import Tensor, nn

from lit_compress.layers import GatedLinear, GatedNorm
from lit_compress.models.cut import SUBLAYER_GATES
from lit_compress.models.residual_stream import stream_norm
from lit_compress.models.sites import Model, get_removable, gives_states, module_at, of_kind, size_at, sublayers
from lit_compress.models.surgery import replace
from lit_compress.numerics.hard_concrete import Size, Weights

GATES = ("attention_layer", "ffn_layer", "heads", "neurons", "hidden")


def possible_gates(net: Model) -> tuple[str, ...]:
    """Return the gates that ``net`` can have: no gate of hidden states where these are its outputs."""
    return GATES if get_removable(net).cuts_stream and not gives_states(net) else GATES[:-1]


def gate_shapes(net: Model, gates: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return name of a gate -> (groups, size) of the dense ``net``."""
    parts = sublayers(net)
    attentions, ffns = of_kind(parts, "attention"), of_kind(parts, "ffn")
    shapes = {
        "attention_layer": (len(attentions), 1),
        "ffn_layer": (len(ffns), 1),
        "heads": (len(attentions), attentions[0].count(net)),
        "neurons": (len(ffns), ffns[0].count(net)),
        "hidden": (1, net.config.hidden_size),
    }
    return {name: shape for name, shape in shapes.items() if name in gates}


def gated_size(net: Model, gates: Collection[str]) -> Size:
    """Return the numbers of site weights of the dense ``net`` that depend on each gate, without biases."""
    weights, parts = list[Weights](), sublayers(net)
    for kind, (layer, unit) in SUBLAYER_GATES.items():
        for group, part in enumerate(of_kind(parts, kind)):
            sizes = {layer: 1, unit: part.count(net), "hidden": net.config.hidden_size}
            factors = [(name, 0 if name == "hidden" else group) for name in sizes if name in gates]
            weights.append((part.weights(net) // prod(sizes[name] for name, _ in factors), *factors))
    return Size(weights, gate_shapes(net, gates))


def gate_net(net: Model, gates: Collection[str]) -> None:
    """Replace the modules that ``gates`` multiply by gated layers, in place; :func:`set_gates` gives them values."""
    for part in sublayers(net):
        layer, unit = SUBLAYER_GATES[part.kind]
        if {layer, unit, "hidden"} & set(gates):
            replace(net, part.last, GatedLinear(net.get_submodule(part.last)))
        if part.norm and {layer, "hidden"} & set(gates):
            replace(net, part.norm, GatedNorm(module_at(net, part.norm, nn.LayerNorm)))
    if "hidden" in gates:
        name = stream_norm(net)
        replace(net, name, GatedNorm(module_at(net, name, nn.LayerNorm), first=True))


def set_gates(net: Model, z: dict[str, Tensor], deterministic: bool = False) -> None:
    """Give the gated layers of ``net`` their values [groups, size] by gate for the next forwards.

    ``deterministic``: the values are those that :func:`~lit_compress.models.cut.cut_closed` would use.
    """
    parts = sublayers(net)
    hidden = z["hidden"][0] if "hidden" in z else None
    share = float((hidden > 0).float().mean()) if deterministic and hidden is not None else 1.0
    for kind, (name, unit) in SUBLAYER_GATES.items():
        for group, part in enumerate(of_kind(parts, kind)):
            if not isinstance(last := net.get_submodule(part.last), GatedLinear):
                continue
            layer = z[name][group] if name in z else None
            if unit in z:
                _, inputs = size_at(last, "layer")
                last.z_in = z[unit][group].repeat_interleave(inputs // z[unit].shape[1], output_size=inputs)
            if layer is not None or hidden is not None:
                last.z_out = hidden if layer is None else layer if hidden is None else layer * hidden
            if part.norm and isinstance(norm := net.get_submodule(part.norm), GatedNorm):
                norm.z, norm.z_layer, norm.share = hidden, layer, share
    if hidden is not None:
        first = module_at(net, stream_norm(net), GatedNorm)
        first.z, first.share = hidden, share
