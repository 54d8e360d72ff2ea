"""SP3's form of a post-LN encoder (Hu et al. 2024): put the projections in, count what their gates leave, multiply all.

A site is a LayerNorm on the residual stream: that of the embeddings, and two in every block. With the gates z of a site
and its projections, what stands between two sites becomes, in float64 (Eqs. 15, 16; the paper swaps M and F in 15):

    A = diag(z) P_in restricted to the rows with z > 0,  a = z * shift        what is written to the site
    B = P_out diag(z) restricted to those columns,  beta                      what is read from it
    W_R = A' B,  W_Q = z_qk P_Q W_Q B,  W_O = z_mha A' W_O P_O,  W_U = W_U[kept] B,  W_D = z_ffn A' W_D z_f

Only a site's own norm sees a, once, in the bias of W_R. RMSNorm over k kept directions divides by k; the original width
d stays the divisor: eps d / k, and sqrt(d / k) in B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lit_compress.budget import dense_site_params
from lit_compress.errors import UserError
from lit_compress.families import base_prefix
from lit_compress.gates import Size, Weights
from lit_compress.layers import NarrowLinear, NarrowNorm, Nothing, ProjectedLinear, ProjectedNorm, SizedEmbedding
from lit_compress.layers.projected import Norm
from lit_compress.projections import block_diagonal, site_projections
from lit_compress.sublayers import ANATOMIES, get_anatomy, readers, sublayers
from lit_compress.surgery import replace, set_attributes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GateName = Literal["hidden", "qk", "vo", "ffn", "head", "mha", "ffn_layer"]
GATES: tuple[GateName, ...] = ("hidden", "qk", "vo", "ffn", "head", "mha", "ffn_layer")
DIMENSIONS: tuple[GateName, ...] = ("hidden", "qk", "vo", "ffn")  # the others are whole heads and layers

# from the base model
_FIRST = "embeddings.LayerNorm"
_TABLES = tuple(f"embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type"))


@dataclass(frozen=True)
class Layout:
    """Names of the parts of a net.

    Attributes:
        norms: the sites in order: the embeddings', then two per block.
        blocks: role -> name of the Linear, per block.
        tables: Embeddings that are written to the first site.
        reader: what reads the last site.
    """

    norms: list[str]
    blocks: list[dict[str, str]]
    tables: list[str]
    reader: str


def layout(net: PreTrainedModel) -> Layout:
    """Find the parts of ``net``.

    Raises:
        UserError: its family has no LayerNorms after the residual sums, or has something else that cannot be projected.
    """
    kind, d, prefix = net.config.model_type, net.config.hidden_size, base_prefix(net)
    known = [name for name, anatomy in ANATOMIES.items() if all(part.norm for part in anatomy.parts)]
    if kind not in known:
        raise UserError(f"model.backbone: sp3 cannot project '{kind}'; it can: {', '.join(known)}")
    if getattr(net.config, "embedding_size", d) != d:
        raise UserError(
            f"model.backbone: sp3 needs embeddings of the hidden states' width {d}, this net's have "
            f"{net.config.embedding_size}"
        )
    if getattr(net.config, "conv_kernel_size", 0) or not getattr(net.config, "share_att_key", True):
        raise UserError(
            "model.backbone: sp3 cannot project a DeBERTa with a convolution, or whose positions have projections of "
            "their own; valid: no conv_kernel_size, share_att_key true (v3)"
        )
    parts, there = sublayers(net), dict(net.named_modules())
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return Layout(
        [prefix + _FIRST, *(str(part.norm) for part in parts)],
        [attention.sites | ffn.sites for attention, ffn in pairs],
        [prefix + table for table in _TABLES if there.get(prefix + table) is not None],
        readers(net)[0],
    )


def head_count(net: PreTrainedModel) -> int:
    """Return the number of attention heads of the dense net."""
    return net.config.num_attention_heads


# ------------------------------------------------------------------------------------------------ insert


@dataclass(frozen=True)
class Bases:
    """The projections of a net, float64.

    Attributes:
        sites: U [d, d] of every site.
        query, key, value: P_Q, P_K, P_V = P_O^T [heads, d_h, d_h] of every block.
    """

    sites: Sequence[Tensor]
    query: Sequence[Tensor]
    key: Sequence[Tensor]
    value: Sequence[Tensor]


def identity_bases(net: PreTrainedModel) -> Bases:
    """Return projections that project nothing (the paper's Table 3 without PCA)."""
    d, heads, count = net.config.hidden_size, head_count(net), net.config.num_hidden_layers
    one, small = torch.eye(d).double(), torch.eye(d // heads).double().expand(heads, -1, -1)
    return Bases([one] * (2 * count + 1), *([small] * count for _ in range(3)))


@torch.no_grad()
def insert_projections(
    net: PreTrainedModel,
    bases: Bases,
    gates: Sequence[GateName] = GATES,
    norm: Norm = "rms",
    skip: int = 0,
) -> PreTrainedModel:
    """Put projections and open gates into ``net``, in place; with ``rms`` its outputs stay what they are.

    Without a gate on the hidden states, the sites stay LayerNorms.

    Args:
        net: post-LN, dense.
        bases: the projections.
        gates: which there are.
        norm: of the sites; ``padded_layernorm`` is the authors', with P_in = U^T: not exact.
        skip: sites from the first that get the identity and no gate.
    """
    parts, heads, dtype = layout(net), head_count(net), net.dtype
    for i, name in enumerate(parts.norms if "hidden" in gates else ()):
        old = net.get_submodule(name)
        axes = bases.sites[i] if i >= skip else torch.eye(old.weight.numel()).double()
        p_in, p_out = site_projections(axes, old.weight)
        site = ProjectedNorm(old.weight.numel(), _eps(old), norm if i >= skip else "rms")
        _fill(site, p_in=axes.mT if site.norm == "padded_layernorm" else p_in, p_out=p_out, bias=old.bias)
        replace(net, name, site)
    for names, query, key, value in zip(parts.blocks, bases.query, bases.key, bases.value, strict=True):
        d, neurons = (net.get_submodule(names[role]).in_features for role in ("q", "down"))
        for role, projection, side, inner, outer in (
            ("q", query, "out", 0, d * ("qk" in gates)),
            ("k", key, "out", 0, 0),
            ("v", value, "out", 0, d * ("vo" in gates or "head" in gates)),
            ("o", value.mT, "in", 0, int("mha" in gates)),
            ("down", None, None, neurons * ("ffn" in gates), int("ffn_layer" in gates)),
        ):
            old = net.get_submodule(names[role])
            new = ProjectedLinear(old.in_features, old.out_features, old.bias is not None, side, heads, inner, outer)
            matrix = None if projection is None else block_diagonal(projection)
            _fill(new, weight=old.weight, bias=old.bias, projection=matrix)
            replace(net, names[role], new)
    return net.to(dtype).train(net.training)


def _eps(norm: nn.Module) -> float:
    return getattr(norm, "eps", None) or norm.variance_epsilon  # type: ignore[return-value]


def _fill(module: nn.Module, **values: Tensor | None) -> None:
    """Set parameters; they keep the dtype of the values until the net is cast as a whole.

    Contiguous, as a checkpoint gives them back: a product rounds otherwise with transposed strides.
    """
    for name, value in values.items():
        if value is not None:
            setattr(module, name, nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)))


# ------------------------------------------------------------------------------------------------- count


def gate_shapes(net: PreTrainedModel, gates: Sequence[GateName] = GATES, skip: int = 0) -> dict[str, tuple[int, int]]:
    """Return name of a gate -> (groups, units): sites from the ``skip``-th, or blocks."""
    count, heads, d = net.config.num_hidden_layers, head_count(net), net.config.hidden_size
    neurons = net.get_submodule(layout(net).blocks[0]["down"]).in_features
    shapes = {
        "hidden": (2 * count + 1 - skip, d), "qk": (count, d // heads), "vo": (count, d // heads),
        "ffn": (count, neurons), "head": (count, heads), "mha": (count, 1), "ffn_layer": (count, 1),
    }  # fmt: skip
    return {name: shapes[name] for name in gates}


def gated_size(net: PreTrainedModel, gates: Sequence[GateName] = GATES, skip: int = 0) -> Size:
    """Return what counts the matrices between the sites, W_R included, for numbers of kept units (Appendix C, Eq. 30).

    The printed sum of W_R runs over one index; a matrix has the product of both sides. A density is a fraction of the
    dense net's matrices, which has no W_R.

    Args:
        net: dense or in training form.
        gates: which there are; all units of the others stay.
        skip: sites from the first without a gate.
    """
    every = gate_shapes(net)
    count, residual = every["qk"][0], "hidden" in gates

    def weights(number: int, *units: tuple[str, int]) -> Weights:
        gated = []
        for name, group in units:
            if name in gates and (name != "hidden" or group >= skip):
                gated.append((name, group - skip if name == "hidden" else group))
            else:
                number *= every[name][1]
        return Weights(number, *gated)

    parts = []
    for i in range(count):
        before, middle, after = (("hidden", 2 * i + j) for j in range(3))
        attention, ffn = (("mha", i), ("head", i)), (("ffn_layer", i), ("ffn", i))
        parts += [
            weights(2, before, ("qk", i), *attention), weights(1, before, ("vo", i), *attention),
            weights(1, middle, ("vo", i), *attention), weights(1, middle, *ffn), weights(1, after, *ffn),
        ]  # fmt: skip
        parts += [weights(1, before, middle), weights(1, middle, after)] if residual else []
    return Size(parts, gate_shapes(net, gates, skip), dense_site_params(net))


class Places:
    """Where the values of the gates go in a net in training form."""

    def __init__(self, net: PreTrainedModel, gates: Sequence[GateName] = GATES, skip: int = 0) -> None:
        parts = layout(net)
        self.norms = [net.get_submodule(name) for name in parts.norms[skip:]] if "hidden" in gates else []
        self.blocks = [{role: net.get_submodule(name) for role, name in names.items()} for names in parts.blocks]

    def put(self, z: Mapping[str, Tensor]) -> None:
        """Set the values [groups, units] of every gate, by name; those of ``qk`` and ``vo`` for every head."""
        for norm, values in zip(self.norms, z.get("hidden", ()), strict=True):
            norm.z = values
        for i, block in enumerate(self.blocks):
            q, v, o, down = (block[role] for role in ("q", "v", "o", "down"))
            if "qk" in z:
                q.z_out = z["qk"][i]
            if "head" in z:
                heads = z["head"][i].repeat_interleave(v.out_features // v.heads)
                v.z_out = heads * z["vo"][i] if "vo" in z else heads
            elif "vo" in z:
                v.z_out = z["vo"][i]
            if "mha" in z:
                o.z_out = z["mha"][i]
            if "ffn" in z:
                down.z_in = z["ffn"][i]
            if "ffn_layer" in z:
                down.z_out = z["ffn_layer"][i]


# -------------------------------------------------------------------------------------------------- fuse


@dataclass(frozen=True)
class _Site:
    """One site, multiplied out: A, a, B, beta, and the norm that is left."""

    write: Tensor
    shift: Tensor
    read: Tensor
    beta: Tensor
    eps: float
    padded: int

    @property
    def width(self) -> int:
        return len(self.shift)


def _site(module: ProjectedNorm) -> _Site:
    d = module.features
    z = module.z.double()
    kept = z > 0
    k = int(kept.sum())
    p_in, p_out, shift = (p.detach().double() for p in (module.p_in, module.p_out, module.shift))
    write, read, beta = z[kept, None] * p_in[kept], p_out[:, kept] * z[kept], module.bias.detach().double()
    if module.norm == "padded_layernorm":
        scale, offset = (p.detach().double()[kept] for p in (module.scale, module.offset))
        return _Site(write, (z * shift)[kept], read * scale, beta + read @ offset, module.eps, d)
    ratio = d / k
    return _Site(write, (z * shift)[kept], read * ratio**0.5, beta, module.eps * ratio, 0)


def is_projected(net: PreTrainedModel) -> bool:
    """Whether ``net`` is in SP3's training form."""
    return any(isinstance(module, (ProjectedNorm, ProjectedLinear)) for module in net.modules())


@torch.no_grad()
def fuse_projections(net: PreTrainedModel) -> PreTrainedModel:
    """Multiply projections and gates of ``net`` into narrow layers, in place; its outputs in evaluation mode stay."""
    parts, d, dtype = layout(net), net.config.hidden_size, net.dtype
    norms = [net.get_submodule(name) for name in parts.norms]
    if not isinstance(norms[0], ProjectedNorm):
        one, zero = torch.eye(d).double(), torch.zeros(d).double()
        sites = [_Site(one, zero, one, zero, 0.0, 0)] * len(norms)
        leads = [0] * len(norms)
    else:
        sites = [_site(norm) for norm in norms]  # type: ignore[arg-type]
        leads = [0, *(site.width for site in sites[:-1])]
        for i, (name, site) in enumerate(zip(parts.norms, sites, strict=True)):
            room = sites[i + 1].width if i + 1 < len(sites) else 0
            new = NarrowNorm(leads[i], site.width, room, site.eps, site.padded)
            if i:
                before = sites[i - 1]
                _fill(new, weight=site.write @ before.read, bias=site.write @ before.beta + site.shift)
            replace(net, name, new)
        for i, name in enumerate(parts.tables):
            old = net.get_submodule(name)
            table = old.weight.double() @ sites[0].write.mT + (sites[0].shift if i == 0 else 0.0)
            replace(net, name, _narrow_table(table))
        old = net.get_submodule(parts.reader)
        weight, bias = _read(*_plain(old), sites[-1])
        replace(net, parts.reader, _narrow(weight, bias))
    relative = _take_positions(net)
    for i, names in enumerate(parts.blocks):
        before, middle, after = sites[2 * i : 2 * i + 3]
        if relative is not None:
            _fuse_positions(net, names, relative)
        _fuse_attention(net, names, before, middle, leads[2 * i + 1])
        _fuse_ffn(net, names, middle, after, leads[2 * i + 2])
    return net.to(dtype)


def _plain(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a Linear and the projection of its outputs, without gates, in float64."""
    weight = layer.weight.double()  # type: ignore[operator]
    bias = torch.zeros(len(weight)).double() if layer.bias is None else layer.bias.double()  # type: ignore
    if getattr(layer, "side", None) == "out":
        projection = layer.projection.double()  # type: ignore[operator]
        weight, bias = projection @ weight, projection @ bias + layer.shift.double()  # type: ignore[operator]
    return weight, bias


def _read(weight: Tensor, bias: Tensor, site: _Site) -> tuple[Tensor, Tensor]:
    return weight @ site.read, weight @ site.beta + bias


def _gate(values: Tensor | None, size: int) -> Tensor:
    return torch.ones(size).double() if values is None else values.double()


def _fuse_attention(net: PreTrainedModel, names: dict[str, str], before: _Site, after: _Site, lead: int) -> None:
    q, k, v, o = (net.get_submodule(names[role]) for role in "qkvo")
    heads, d, alive = q.heads, q.out_features, _gate(o.z_out, 1)  # type: ignore
    z_q = _gate(q.z_out, d).view(heads, -1)  # type: ignore
    z_v = alive.ne(0) * _gate(v.z_out, d).view(heads, -1)  # type: ignore
    used = z_v.gt(0).any(1)  # heads; then the directions, the same in each of them
    in_scores, in_values = z_q.gt(0).any(0), z_v.gt(0).any(0)

    def rows(layer: nn.Module, directions: Tensor, z: Tensor) -> NarrowLinear:
        weight, bias = _read(*_plain(layer), before)
        picked, z = (used[:, None] & directions).flatten(), z.flatten()
        weight, bias = (z[:, None] * weight)[picked], (z * bias)[picked]
        new = _narrow(weight, bias, side="out", heads=int(used.sum()), head_width=d // heads)
        if hasattr(layer, "positions"):
            new.add_positions(layer.positions[:, picked])
        return new

    replace(net, names["q"], rows(q, in_scores, z_q))
    replace(net, names["k"], rows(k, in_scores, torch.ones_like(z_q)))
    replace(net, names["v"], rows(v, in_values, z_v))
    weight, bias = o.weight.double(), o.bias.double()  # type: ignore
    picked = (used[:, None] & in_values).flatten()
    bias = alive * (after.write @ (weight @ o.shift.double() + bias))  # type: ignore
    weight = alive * (after.write @ weight @ o.projection.double()[:, picked])  # type: ignore
    new = _narrow(weight, bias, lead=lead, side="in", heads=int(used.sum()), head_width=d // heads)
    replace(net, names["o"], new)
    change = get_anatomy(net).attributes(d // heads, max(1, int(used.sum())))
    if change:
        set_attributes(net.get_submodule(names["q"].rpartition(".")[0]), change)


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
        weight, bias = _plain(layer)
        layer.positions = _gate(layer.z_out, len(weight)) * (positions @ weight.mT + bias)  # type: ignore


def _fuse_ffn(net: PreTrainedModel, names: dict[str, str], before: _Site, after: _Site, lead: int) -> None:
    up, down = net.get_submodule(names["up"]), net.get_submodule(names["down"])
    alive = _gate(down.z_out, 1)  # type: ignore
    z = alive.ne(0) * _gate(down.z_in, down.in_features)  # type: ignore
    kept = z > 0
    weight, bias = _read(*_plain(up), before)
    replace(net, names["up"], _narrow(weight[kept], bias[kept]))
    weight, bias = (down.weight.double() * z)[:, kept], down.bias.double()  # type: ignore
    weight, bias = alive * (after.write @ weight), alive * (after.write @ bias)
    replace(net, names["down"], _narrow(weight, bias, lead=lead))


def _narrow(weight: Tensor, bias: Tensor, **places: int | str) -> NarrowLinear:
    layer = NarrowLinear(weight.shape[1], weight.shape[0], **places)  # type: ignore[arg-type]
    _fill(layer, weight=weight, bias=bias)
    return layer


def _narrow_table(weight: Tensor) -> SizedEmbedding:
    table = SizedEmbedding(*weight.shape)
    _fill(table, weight=weight)
    return table
