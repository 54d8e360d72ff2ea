"""SP3's training form (Hu et al. 2024): put the projections in, count what their gates leave, set the gates.

What is multiplied together afterwards is in condense.py; which norms and blocks there are, in streams.py.

Norms after the residual sum (BERT, BART, ...) become pairs of projections with gates between (projections.py). Norms
before the blocks (OPT, Llama) leave the stream as it is, so it is the stream that changes its basis, in the weights
around it: with U of the site a norm reads, R the removal of the mean where it is a LayerNorm,

    what reads:  W diag(gamma) U,  b + W beta       what writes:  U'^T R W,  U'^T R b
    embeddings:  E R U                              between bases:  x -> U'^T U (z * x)
    norm:        z * rms(z * x), over the original width

z is put where x is read: directions that are off may hold anything. That form has no projections to train, so its
matrices are trained. Before rotary embeddings queries and keys cannot be projected, nor heads of shared keys taken out:
Llama has gates of hidden states and neurons. ALBERT's blocks read the embeddings first, then what they wrote: there,
and where embeddings have another width, hidden states keep their basis and have no gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lit_compress.budget import dense_site_params
from lit_compress.errors import UserError
from lit_compress.families import head_width
from lit_compress.gates import Size, Weights
from lit_compress.layers import (
    Junction,
    NarrowLinear,
    ProjectedLinear,
    ProjectedNorm,
    StreamBlock,
    StreamNorm,
)
from lit_compress.layers.projected import HeadProjections, Norm
from lit_compress.projections import block_diagonal, site_projections
from lit_compress.streams import STREAMS, Layout, layout
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GateName = Literal["hidden", "qk", "vo", "ffn", "head", "mha", "ffn_layer"]
GATES: tuple[GateName, ...] = ("hidden", "qk", "vo", "ffn", "head", "mha", "ffn_layer")
DIMENSIONS: tuple[GateName, ...] = ("hidden", "qk", "vo", "ffn")  # the others are whole heads and layers
_ROTARY: tuple[GateName, ...] = ("hidden", "ffn")


@dataclass(frozen=True)
class Form:
    """Which projections and gates a net gets.

    Attributes:
        gates: which there are.
        skip: sites from the first that get the identity and no gate.
        group: blocks that share a site, where norms stand before the blocks.
        norm: of the sites after residual sums; ``padded_layernorm`` is the authors', with P_in = U^T: not exact.
        heads: projections of heads are one matrix, in which heads can mix when it is trained, or a block per head.
    """

    gates: Sequence[GateName] = GATES
    skip: int = 0
    group: int = 1
    norm: Norm = "rms"
    heads: HeadProjections = "dense"

    def layout(self, net: PreTrainedModel) -> Layout:
        """Return the sites and blocks of ``net``.

        Raises:
            UserError: its family cannot have them.
        """
        parts = layout(net, self.group)
        valid = GATES if has_head_projections(net) else _ROTARY
        if parts.fixed:
            valid = tuple(name for name in valid if name != "hidden")
        if wrong := [name for name in self.gates if name not in valid]:
            why = f" ({parts.fixed})" if parts.fixed else ""
            raise UserError(
                f"prune.gates: {net.config.model_type} has no {', '.join(wrong)}{why}; it has {', '.join(valid)}"
            )
        if "hidden" not in self.gates:
            if self.group > 1:
                raise UserError(f"prune.group: {self.group} share bases of hidden states, which have no gate; valid: 1")
            return parts
        if not 0 <= self.skip < len(parts.sites):
            raise UserError(
                f"prune.skip_sites: {self.skip} of {len(parts.sites)} sites; valid: 0 to {len(parts.sites) - 1}"
            )
        if self.norm != "rms" and parts.before:
            raise UserError(
                f"prune.norm: {self.norm} takes the place of LayerNorms after the blocks, those of "
                f"{net.config.model_type} stand before them; valid: rms"
            )
        return parts


# ------------------------------------------------------------------------------------------------ insert


@dataclass(frozen=True)
class Bases:
    """The projections of a net, float64.

    Attributes:
        sites: U [d, d] of every site that can have one.
        query, key, value: P_Q, P_K, P_V = P_O^T [heads, d_h, d_h] of every attention; none where heads have no gates.
    """

    sites: Sequence[Tensor]
    query: Sequence[Tensor]
    key: Sequence[Tensor]
    value: Sequence[Tensor]


def has_head_projections(net: PreTrainedModel) -> bool:
    """Say whether the heads of ``net`` can be projected."""
    return not STREAMS[net.config.model_type].rotary


def identity_bases(net: PreTrainedModel, group: int = 1) -> Bases:
    """Return projections that project nothing (the paper's Table 3 without PCA)."""
    parts, heads = layout(net, group), net.config.num_attention_heads
    one, small = (torch.eye(size).double() for size in (net.config.hidden_size, head_width(net, "encoder")))
    count = len(parts.attentions) * has_head_projections(net)
    return Bases([one] * len(parts.turnable), *([small.expand(heads, -1, -1)] * count for _ in range(3)))


@torch.no_grad()
def insert_projections(net: PreTrainedModel, bases: Bases, form: Form = Form()) -> PreTrainedModel:
    """Put projections and open gates into ``net``, in place; with ``rms`` its outputs stay what they are.

    Without a gate on the hidden states, the norms stay what they are.

    Args:
        net: dense.
        bases: the projections.
        form: which there are.

    Raises:
        UserError: the family of ``net`` cannot have them.
    """
    parts, heads, dtype = form.layout(net), net.config.num_attention_heads, net.dtype
    if "hidden" in form.gates:
        axes = [u if i >= form.skip else torch.eye(len(u)).double() for i, u in enumerate(bases.sites)]
        _turn(net, parts, axes) if parts.before else _project_norms(net, parts, axes, form)
    if has_head_projections(net):
        for block, *projections in zip(parts.attentions, bases.query, bases.key, bases.value, strict=True):
            d = net.get_submodule(block.linears["q"]).out_features
            for role, projection, side, gates in zip(
                "qkvo",
                (*projections, projections[-1].mT),
                ("out", "out", "out", "in"),
                (d * ("qk" in form.gates), 0, d * ("vo" in form.gates or "head" in form.gates), "mha" in form.gates),
                strict=True,
            ):
                matrix = block_diagonal(projection) if form.heads == "dense" else projection
                _put(net, block.linears[role], matrix, side, heads, 0, int(gates), form.heads)
    for block in parts.networks:
        neurons = net.get_submodule(block.linears["down"]).in_features * ("ffn" in form.gates)
        _put(net, block.linears["down"], None, None, 1, neurons, int("ffn_layer" in form.gates))
    return net.to(dtype).train(net.training)


def _put(net: PreTrainedModel, name: str, projection: Tensor | None, *sizes: object) -> None:
    """Put a Linear with a projection and gates in the place of one without."""
    old = net.get_submodule(name)
    new = ProjectedLinear(old.in_features, old.out_features, old.bias is not None, *sizes)  # type: ignore[arg-type]
    fill(new, weight=old.weight, bias=old.bias, projection=projection)
    replace(net, name, new)


def _project_norms(net: PreTrainedModel, parts: Layout, axes: Sequence[Tensor], form: Form) -> None:
    """Put projections in the places of LayerNorms after residual sums."""
    for i, (place, u) in enumerate(zip(parts.sites, axes, strict=True)):
        old = net.get_submodule(place.norms[0])
        p_in, p_out = site_projections(u, old.weight)
        site = ProjectedNorm(old.weight.numel(), _eps(old), form.norm if i >= form.skip else "rms")
        fill(site, p_in=u.mT if site.norm == "padded_layernorm" else p_in, p_out=p_out, bias=old.bias)
        replace(net, place.norms[0], site)


def _turn(net: PreTrainedModel, parts: Layout, axes: Sequence[Tensor]) -> None:
    """Give the stream, where norms stand before the blocks, the directions ``axes`` of its sites."""
    norms = {name: net.get_submodule(name) for place in parts.sites for name in place.norms}
    centred = not STREAMS[net.config.model_type].rms
    writes = [u.mT - u.mean(0)[:, None] if centred else u.mT for u in axes]  # U^T R
    for place in parts.sites:
        for name in place.tables:
            table = net.get_submodule(name)
            fill(table, weight=table.weight.double() @ writes[0].mT)
    for block in parts.blocks:
        for role in block.roles:
            _absorb(net, block.linears[role], norms[block.norm], axes[block.reads])
        last = net.get_submodule(block.linears[block.last])
        weight, bias = plain(last)
        fill(last, weight=writes[block.writes] @ weight, bias=None if bias is None else writes[block.writes] @ bias)
        if block.part == "attention":
            StreamBlock.adopt(net.get_submodule(block.host))
    for block in parts.ends:
        junction = Junction(net.config.hidden_size)
        fill(junction, weight=axes[block.writes].mT @ axes[block.reads])
        replace(net, block.junction, junction)
    _absorb(net, parts.reader, norms[parts.sites[-1].norms[-1]], axes[-1])
    net.config.tie_word_embeddings = False
    for name, norm in norms.items():
        replace(net, name, StreamNorm(net.config.hidden_size, _eps(norm)))


def _absorb(net: PreTrainedModel, name: str, norm: nn.Module, axes: Tensor) -> None:
    """Let a Linear read rms(x) in the basis ``axes`` where it read the output of ``norm``."""
    weight, bias = plain(net.get_submodule(name))
    gamma, beta = (getattr(norm, kind, None) for kind in ("weight", "bias"))
    if beta is not None:
        bias = weight @ beta.double() + (0 if bias is None else bias)
    new = NarrowLinear(weight.shape[1], weight.shape[0], bias is not None)
    fill(new, weight=(weight if gamma is None else weight * gamma.double()) @ axes, bias=bias)
    replace(net, name, new)


def plain(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a Linear and of the projection of its outputs, without gates, in float64."""
    weight = layer.weight.double()  # type: ignore[operator]
    bias = None if layer.bias is None else layer.bias.double()  # type: ignore[operator]
    if getattr(layer, "side", None) == "out":
        projection, shift = layer.matrix().double(), layer.shift.double()  # type: ignore[operator]
        weight, bias = projection @ weight, shift if bias is None else projection @ bias + shift
    return weight, bias


def fill(module: nn.Module, **values: Tensor | None) -> None:
    """Set parameters; they keep the dtype of the values until the net is cast as a whole.

    Contiguous, as a checkpoint gives them back: a product rounds otherwise with transposed strides.
    """
    for name, value in values.items():
        if value is not None:
            setattr(module, name, nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)))


def _eps(norm: nn.Module) -> float:
    return getattr(norm, "eps", None) or norm.variance_epsilon  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------- count


def gate_shapes(net: PreTrainedModel, form: Form = Form()) -> dict[str, tuple[int, int]]:
    """Return name of a gate -> (groups, units): sites from the ``skip``-th, attentions, or feed-forward networks."""
    shapes = _shapes(net, form.layout(net))
    shapes["hidden"] = (shapes["hidden"][0] - form.skip, shapes["hidden"][1])
    return {name: shapes[name] for name in form.gates}


def _shapes(net: PreTrainedModel, parts: Layout) -> dict[str, tuple[int, int]]:
    """Return the shapes of all gates, and of sites without one."""
    attentions, networks, wide = len(parts.attentions), len(parts.networks), head_width(net, "encoder")
    neurons = net.get_submodule(parts.networks[0].linears["down"]).in_features
    return {
        "hidden": (len(parts.sites), net.config.hidden_size), "qk": (attentions, wide), "vo": (attentions, wide),
        "ffn": (networks, neurons), "head": (attentions, net.config.num_attention_heads), "mha": (attentions, 1),
        "ffn_layer": (networks, 1),
    }  # fmt: skip


def gated_size(net: PreTrainedModel, form: Form = Form()) -> Size:
    """Return what counts the matrices between the sites, W_R included, for numbers of kept units (Appendix C, Eq. 30).

    The printed sum of W_R runs over one index; a matrix has the product of both sides. A density is a fraction of the
    dense net's matrices, which has no W_R.

    Args:
        net: dense or in training form.
        form: which gates there are; all units of the others stay.
    """
    parts = form.layout(net)
    every = _shapes(net, parts)

    def weights(number: int, *units: tuple[str, int]) -> Weights:
        gated = []
        for name, group in units:
            if name in form.gates and (name != "hidden" or group >= form.skip):
                gated.append((name, group - form.skip if name == "hidden" else group))
            else:
                number *= every[name][1]
        return Weights(number, *gated)

    found = []
    for i, block in enumerate(parts.attentions):
        whole = (("mha", i), ("head", i))
        for role, read in (*block.roles.items(), ("o", block.writes)):
            if has_head_projections(net):
                inner = ("qk" if role in "qk" else "vo", i)
                found.append(weights(1, ("hidden", read), inner, *whole))
            else:
                layer = net.get_submodule(block.linears[role])
                found.append(weights(layer.in_features if role == "o" else layer.out_features, ("hidden", read)))
    for i, block in enumerate(parts.networks):
        for read in (*block.roles.values(), block.writes):
            found.append(weights(1, ("hidden", read), ("ffn_layer", i), ("ffn", i)))
    if "hidden" in form.gates:
        pairs = [(block.reads, block.writes) for block in parts.blocks if block.reads != block.writes]
        found += [weights(1, ("hidden", read), ("hidden", write)) for read, write in pairs]
    return Size(found, gate_shapes(net, form), dense_site_params(net))


class Places:
    """Where the values of the gates go in a net in training form."""

    def __init__(self, net: PreTrainedModel, form: Form = Form()) -> None:
        parts = form.layout(net)
        self.sites: list[list[nn.Module]] = []
        for i, place in enumerate(parts.sites[form.skip :] if "hidden" in form.gates else (), form.skip):
            ends = [block for block in parts.ends if block.reads == i]
            self.sites.append([net.get_submodule(name) for name in (*place.norms, *(block.junction for block in ends))])
        self.attentions, self.networks = (
            [{role: net.get_submodule(name) for role, name in block.linears.items()} for block in blocks]
            for blocks in (parts.attentions, parts.networks)
        )

    def put(self, z: Mapping[str, Tensor]) -> None:
        """Set the values [groups, units] of every gate, by name; those of ``qk`` and ``vo`` for every head."""
        for modules, values in zip(self.sites, z.get("hidden", ()), strict=True):
            for module in modules:
                module.z = values
        for i, block in enumerate(self.attentions):
            if "qk" in z:
                block["q"].z_out = z["qk"][i]
            v = block["v"]
            if "head" in z:
                heads = z["head"][i].repeat_interleave(v.out_features // v.heads)
                v.z_out = heads * z["vo"][i] if "vo" in z else heads
            elif "vo" in z:
                v.z_out = z["vo"][i]
            if "mha" in z:
                block["o"].z_out = z["mha"][i]
        for i, block in enumerate(self.networks):
            if "ffn" in z:
                block["down"].z_in = z["ffn"][i]
            if "ffn_layer" in z:
                block["down"].z_out = z["ffn_layer"][i]
