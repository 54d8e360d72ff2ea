"""The residual stream of a model as a graph: which norms read it, which sub-layers read and write it, in which bases.

SP3 (Hu et al. 2024) gives every site of the stream its own directions and gates. In post-norm models a site is a
LayerNorm: every sub-layer reads one and writes the next. In pre-norm models sites are bases of the stream, which
changes its basis behind every sub-layer but the last (section 3.5). These sites are places of the residual stream, not
the matrices of models/sites.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_compress.models.architectures import families_with, get_architecture
from lit_compress.models.sites import Model, SubLayer, base_prefix, blocks, get_removable, gives_states, has, of_kind
from lit_compress.models.sites import sublayers as find_sublayers
from lit_compress.utils.errors import UserError


@dataclass(frozen=True)
class StreamSite:
    """A site of the residual stream of a stack, with its own directions.

    ``norms`` are names of the norms that read it: one, and of a pre-norm model's last site also the norm behind the
    blocks; ``tables`` of the embeddings that write to it.
    """

    norms: list[str]
    tables: list[str]
    stack: str


@dataclass(frozen=True)
class StreamSubLayer(SubLayer):
    """A sub-layer between two sites of the residual stream; ``norm`` is the norm before it in a pre-norm model.

    Attributes:
        reads, writes: indices of the sites that it reads and writes.
        memory: index of the site that keys and values read: over the encoder's states its last, else ``reads``.
    """

    norm: str
    reads: int
    writes: int
    memory: int

    @property
    def roles(self) -> dict[str, int]:
        """Role -> index of the site that it reads; ``o`` and ``down`` read none."""
        return {r: self.memory if r in ("k", "v") else self.reads for r in self.sites if self.sites[r] != self.last}

    @property
    def junction(self) -> str:
        """Name of the module that changes the basis of the stream, if it changes behind this sub-layer."""
        return f"{self.block}.{'end' if self.kind == 'ffn' else 'middle'}"


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream of a model, in forward order.

    Attributes:
        reader: name of the Linear that reads the last hidden states; empty if none does.
        pre_norm: the norms are before the sub-layers.
        fixed: the reason why hidden states must keep their basis; empty if they need not.
    """

    sites: list[StreamSite]
    sublayers: list[StreamSubLayer]
    reader: str
    pre_norm: bool
    fixed: str

    @property
    def rotatable(self) -> list[StreamSite]:
        """The sites whose basis can be changed: all or none."""
        return [] if self.fixed else self.sites

    @property
    def attentions(self) -> list[StreamSubLayer]:
        """The attentions, those over the encoder's states included."""
        return of_kind(self.sublayers, "attention")

    @property
    def turns(self) -> list[StreamSubLayer]:
        """The sub-layers of a pre-norm model behind which the basis changes: all but the last."""
        return [sublayer for sublayer in self.sublayers if self.pre_norm and sublayer.reads != sublayer.writes]

    @property
    def networks(self) -> list[StreamSubLayer]:
        """The feed-forward networks."""
        return of_kind(self.sublayers, "ffn")


def has_head_projections(net: Model) -> bool:
    """Return whether the heads of ``net`` can be projected: not if other directions meet in them."""
    architecture = get_architecture(net)
    roles = {role for spec in architecture.sublayers for role in spec.linears.values()}
    return not (architecture.rotary or architecture.head_norms) and {"q", "k", "v"} <= roles


def residual_stream(net: Model) -> ResidualStream:
    """Return sites and sub-layers of ``net``, which may be dense or have replaced Linears and norms.

    Raises:
        UserError: the residual stream cannot be projected.
    """
    _check(net)
    architecture, prefix, parts = get_architecture(net), base_prefix(net), find_sublayers(net, removable=False)
    norms = {spec.kind: spec.norm for spec in architecture.sublayers}
    sites: list[StreamSite] = []
    sublayers: list[StreamSubLayer] = []
    for stack in dict.fromkeys(stack for stack, *_ in blocks(net)):
        end, writers = architecture.stacks[stack].norm, architecture.stacks[stack].writers
        tables = [f"{prefix}{path}" for path in writers if has(net, f"{prefix}{path}")]
        own = [part for part in parts if part.stack == stack]
        memory, first = len(sites) - 1, len(sites)  # memory: the encoder's last site
        if architecture.pre_norm:
            count = max(1, len(own))
            sites += [StreamSite([], list(tables if i == 0 else ()), stack) for i in range(count)]
        else:
            sites += [StreamSite([f"{prefix}{end}"], tables, stack)]
        for i, part in enumerate(own):
            norm = f"{part.block}.{norms[part.type]}"
            if architecture.pre_norm:
                reads, writes = (first + min(j, count - 1) for j in (i, i + 1))
                sites[reads].norms.append(norm)
            else:
                reads, writes = first + i, first + i + 1
                sites.append(StreamSite([norm], [], stack))
            read = memory if part.type == "cross" else reads
            sublayers.append(StreamSubLayer(**vars(part) | {"norm": norm}, reads=reads, writes=writes, memory=read))
        if architecture.pre_norm:
            sites[-1].norms.append(f"{prefix}{end}")
    return ResidualStream(sites, sublayers, _reader(net), architecture.pre_norm, _fixed(net))


def _fixed(net: Model) -> str:
    """Return the reason why the hidden states of ``net`` cannot have another basis; empty if they can."""
    config, d, record = net.config, net.config.hidden_size, get_architecture(net)
    width = getattr(config, "embedding_size", None) or getattr(config, "word_embed_proj_dim", None) or d
    reasons = {
        "its hidden states are what it is asked for": gives_states(net),
        "its blocks run more than once, first on the embeddings": record.repeated,
        "its first attention reads the embeddings without a norm": record.bare_start,
        f"its embeddings have {width} dimensions, its hidden states {d}": width != d,
        record.keeps_basis: record.keeps_basis,
        "do_layer_norm_before is False": not getattr(config, "do_layer_norm_before", True),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _check(net: Model) -> None:
    """Refuse architectures that cannot be projected."""
    config, kind, architecture = net.config, net.config.model_type, get_architecture(net)
    if not architecture.has_residual_stream:
        able = families_with(lambda other: other.has_residual_stream)
        why = f" ({architecture.keeps_basis})" if architecture.keeps_basis else ""
        raise UserError(
            f"model.backbone: the hidden states of '{kind}' cannot be projected{why}; nearest: SecondOrder, or {able}"
        )
    if config.is_encoder_decoder:
        for what in ("attention_heads", "ffn_dim"):
            sizes = [getattr(config, f"{stack}_{what}") for stack in ("encoder", "decoder")]
            if sizes[0] != sizes[1]:
                raise UserError(
                    f"model.backbone: projections need encoder_{what} and decoder_{what} alike, not {sizes}"
                )


def _reader(net: Model) -> str:
    """Return the name of the Linear after the blocks that reads the last hidden states; "" if there is none."""
    base, prefix = net.base_model, base_prefix(net)
    if getattr(base, "pooler", None) is not None:
        return f"{prefix}pooler.dense"
    heads = ("pooler.dense", "pre_classifier", "head.dense", "classifier.dense", "classification_head.dense",
             "qa_outputs", "classifier", "score", "lm_head")  # fmt: skip
    return next((name for name in heads if has(net, name)), "")


def stream_norm(net: Model) -> str:
    """Return the name of the norm of the embeddings, for models that can lose hidden dimensions."""
    return f"{base_prefix(net)}{get_architecture(net).stacks['encoder'].norm}"


def stream_width(net: Model) -> int:
    """Return the number of hidden dimensions of ``net``, without those that were removed."""
    if not get_removable(net).cuts_stream:
        return net.config.hidden_size
    norm = net.get_submodule(stream_norm(net))
    return sum(p.numel() for key, p in norm.named_parameters() if key.endswith("bias"))
