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

from lit_compress.layers.training.gated import GatedLinear, GatedNorm
from lit_compress.models.cut import SUBLAYER_GATES
from lit_compress.models.residual_stream import stream_norm
from lit_compress.models.sites import Model, get_removable, gives_states, module_at, of_kind, size_at, sublayers
from lit_compress.models.surgery import replace
from lit_compress.numerics.hard_concrete import Size, Weights

GATES = ("attention_layer", "ffn_layer", "heads", "neurons", "hidden")


def possible_gates(net: Model) -> tuple[str, ...]:
    """Return the gates that ``net`` can have: no gate of hidden states where these are its outputs."""
    return GATES if get_removable(net).cuts_stream and not gives_states(net) else GATES[:-1]


def gated_size(net: Model, gates: Collection[str]) -> Size:
    """Return the numbers of site weights of the dense ``net`` that depend on each gate, without biases."""
    weights, shapes = list[Weights](), {"hidden": (1, net.config.hidden_size)}
    for kind, (layer, unit) in SUBLAYER_GATES.items():
        parts = of_kind(sublayers(net), kind)
        shapes |= {layer: (len(parts), 1), unit: (len(parts), parts[0].count(net))}
        for group, part in enumerate(parts):
            factors = [(name, 0 if name == "hidden" else group) for name in (layer, unit, "hidden") if name in gates]
            weights.append((part.weights(net) // prod(shapes[name][1] for name, _ in factors), *factors))
    return Size(weights, {name: shapes[name] for name in GATES if name in gates})


def gate_net(net: Model, gates: Collection[str]) -> None:
    """Replace the modules that ``gates`` multiply by gated layers, in place; :func:`set_gates` gives them values."""
    for part in sublayers(net):
        replace(net, part.last, GatedLinear(net.get_submodule(part.last)))
        if part.norm:
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
            last, layer = module_at(net, part.last, GatedLinear), z[name][group]
            if unit in z:
                _, inputs = size_at(last, "layer")
                last.z_in = z[unit][group].repeat_interleave(inputs // z[unit].shape[1], output_size=inputs)
            last.z_out = layer if hidden is None else layer * hidden
            if part.norm:
                norm = module_at(net, part.norm, GatedNorm)
                norm.z, norm.z_layer, norm.share = hidden, layer, share
    if hidden is not None:
        first = module_at(net, stream_norm(net), GatedNorm)
        first.z, first.share = hidden, share
