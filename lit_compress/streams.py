"""The residual stream of a net as a graph: which norms read it, which blocks read and write it, in which bases.

SP3 (Hu et al. 2024) gives every site of the stream directions and gates of its own. After the residual sum (post-LN),
a site is a LayerNorm: every block reads one and writes the next. Before the blocks (pre-LN), sites are bases of the
stream: ``group`` blocks share one, and the stream passes from one to the next where a group ends (section 3.5). All
that SP3 inserts, counts and multiplies follows from this graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lit_compress.errors import UserError
from lit_compress.families import base_prefix, blocks, find_sites
from lit_compress.sublayers import has, readers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = Literal["attention", "cross", "ffn"]


@dataclass(frozen=True)
class Stream:
    """One family.

    Attributes:
        norms: part of a block -> its norm, relative to the block.
        ends: stack -> the norm of the embeddings (after the sum) or of the last states (before the blocks), and the
            embeddings that are written to the stream, with the Linear that widens them; relative to the base model.
        before: the norms stand before the parts (pre-LN).
        rms: they take no mean away.
        rotary: positions turn queries and keys, so that no projection may come before.
        repeated: a block runs more than once, first on what no norm of a block has written.
    """

    norms: dict[Part, str]
    ends: dict[str, tuple[str, tuple[str, ...]]]
    before: bool = False
    rms: bool = False
    rotary: bool = False
    repeated: bool = False


_TABLES = ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings",
           "embeddings_project", "encoder.embedding_hidden_mapping_in")  # fmt: skip
_OPT_TABLES = ("embed_tokens", "embed_positions", "project_in")
_ENDS = {"encoder": ("embeddings.LayerNorm", _TABLES)}
_BERT = Stream({"attention": "attention.output.LayerNorm", "ffn": "output.LayerNorm"}, _ENDS)

STREAMS: dict[str, Stream] = {
    **dict.fromkeys(("bert", "roberta", "electra", "deberta-v2"), _BERT),
    "albert": Stream({"attention": "attention.LayerNorm", "ffn": "full_layer_layer_norm"}, _ENDS, repeated=True),
    "distilbert": Stream({"attention": "sa_layer_norm", "ffn": "output_layer_norm"}, _ENDS),
    "bart": Stream(
        {"attention": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ffn": "final_layer_norm"},
        {
            stack: (f"{stack}.layernorm_embedding", (f"{stack}.embed_tokens", f"{stack}.embed_positions"))
            for stack in ("encoder", "decoder")
        },
    ),
    "opt": Stream(
        {"attention": "self_attn_layer_norm", "ffn": "final_layer_norm"},
        {"decoder": ("decoder.final_layer_norm", tuple(f"decoder.{name}" for name in _OPT_TABLES))},
        before=True,
    ),
    "llama": Stream(
        {"attention": "input_layernorm", "ffn": "post_attention_layernorm"},
        {"decoder": ("norm", ("embed_tokens",))},
        before=True,
        rms=True,
        rotary=True,
    ),
}


@dataclass(frozen=True)
class Site:
    """A place of the stream with directions of its own.

    Attributes:
        norms: names of the norms that read it: one after a residual sum; before the blocks, those of a group.
        tables: names of the embeddings written to it.
        stack: ``encoder`` or ``decoder``.
    """

    norms: list[str]
    tables: list[str]
    stack: str


@dataclass(frozen=True)
class Block:
    """An attention or a feed-forward network between two sites.

    Attributes:
        part: what it is; cross: over the encoder's states.
        host: name of the transformer block it belongs to.
        linears: role -> name.
        norm: name of its norm.
        reads, writes: indices of sites.
        memory: of what keys and values read; ``reads`` but for cross.
    """

    part: Part
    host: str
    linears: dict[str, str]
    norm: str
    reads: int
    writes: int
    memory: int

    @property
    def roles(self) -> dict[str, int]:
        """Role -> index of the site that it reads; ``o`` and ``down`` read none."""
        if self.part == "ffn":
            return {role: self.reads for role in self.linears if role != "down"}
        return {"q": self.reads, "k": self.memory, "v": self.memory}

    @property
    def last(self) -> str:
        """Role of the Linear that writes to the stream."""
        return "down" if self.part == "ffn" else "o"

    @property
    def junction(self) -> str:
        """Name of what the stream passes into another basis, where this block ends a group."""
        return f"{self.host}.{'end' if self.part == 'ffn' else 'middle'}"


@dataclass(frozen=True)
class Layout:
    """A net.

    Attributes:
        sites: in forward order.
        blocks: in forward order.
        reader: name of what reads the last states.
        before: the norms stand before the blocks.
        fixed: why the hidden states have to keep their basis; empty where they need not.
    """

    sites: list[Site]
    blocks: list[Block]
    reader: str
    before: bool
    fixed: str

    @property
    def turnable(self) -> list[Site]:
        """Return the sites that can have directions of their own: all, or none."""
        return [] if self.fixed else self.sites

    @property
    def attentions(self) -> list[Block]:
        """Return the blocks that are attentions, those over the encoder's states too."""
        return [block for block in self.blocks if block.part != "ffn"]

    @property
    def ends(self) -> list[Block]:
        """Return the blocks that end a group of those that share a basis."""
        return [block for block in self.blocks if self.before and block.reads != block.writes]

    @property
    def networks(self) -> list[Block]:
        """Return the feed-forward networks."""
        return [block for block in self.blocks if block.part == "ffn"]


def group_of(net: PreTrainedModel) -> int:
    """Return how many blocks share a site in a net of SP3's: one ends where the stream first passes a junction."""
    parts = layout(net)
    if not parts.before:
        return 1
    return next((i for i, block in enumerate(parts.blocks, 1) if has(net, block.junction)), len(parts.blocks))


def layout(net: PreTrainedModel, group: int = 1) -> Layout:
    """Find sites and blocks of ``net``, dense or with anything in the places of its Linears and norms.

    Args:
        net: of a family in the table.
        group: blocks that share a basis, where norms stand before the blocks.

    Raises:
        UserError: its stream cannot be projected.
    """
    _check(net, group)
    stream, prefix = STREAMS[net.config.model_type], base_prefix(net)
    found = _parts(net, stream)
    sites: list[Site] = []
    parts: list[Block] = []
    for stack in dict.fromkeys(stack for stack, *_ in found):
        end, tables = stream.ends[stack]
        tables = tuple(f"{prefix}{table}" for table in tables if has(net, f"{prefix}{table}"))
        own = [item[1:] for item in found if item[0] == stack]
        memory, first = len(sites) - 1, len(sites)  # the encoder's last site, where a decoder follows
        if stream.before:
            count = -(-len(own) // group)
            sites += [Site([], list(tables if i == 0 else ()), stack) for i in range(count)]
        else:
            sites += [Site([f"{prefix}{end}"], list(tables), stack)]
        for i, (part, host, linears, norm) in enumerate(own):
            if stream.before:
                reads, writes = (first + min(j // group, count - 1) for j in (i, i + 1))
                sites[reads].norms.append(norm)
            else:
                reads, writes = first + i, first + i + 1
                sites.append(Site([norm], [], stack))
            parts.append(Block(part, host, linears, norm, reads, writes, memory if part == "cross" else reads))
        if stream.before:
            sites[-1].norms.append(f"{prefix}{end}")
    return Layout(sites, parts, readers(net)[0], stream.before, _fixed(net))


def _parts(net: PreTrainedModel, stream: Stream) -> list[tuple[str, Part, str, dict[str, str], str]]:
    """Return (stack, part, name of the transformer block, its Linears by role, its norm) in forward order."""
    hosts = {(stack, layer): name for stack, layer, name, _ in blocks(net)}
    found: dict[tuple[str, int, Part], dict[str, str]] = {}
    for site in find_sites(net):
        part: Part = "ffn" if site.role in ("gate", "up", "down") else "cross" if site.cross else "attention"
        found.setdefault((site.stack, site.layer, part), {})[site.role] = site.name
    return [
        (stack, part, hosts[stack, layer], linears, f"{hosts[stack, layer]}.{stream.norms[part]}")
        for (stack, layer, part), linears in found.items()
    ]


def _fixed(net: PreTrainedModel) -> str:
    """Say why the hidden states of ``net`` cannot have another basis; empty where they can."""
    config = net.config
    d = config.hidden_size
    width = getattr(config, "embedding_size", None) or getattr(config, "word_embed_proj_dim", None) or d
    if STREAMS[config.model_type].repeated:
        return "its blocks run more than once, first on the embeddings"
    if width != d:
        return f"its embeddings have {width} dimensions, its hidden states {d}"
    if getattr(config, "conv_kernel_size", 0):
        return "a convolution reads its hidden states"
    return "" if getattr(config, "do_layer_norm_before", True) else "do_layer_norm_before is False"


def _check(net: PreTrainedModel, group: int) -> None:
    """Refuse what cannot be projected."""
    config, kind = net.config, net.config.model_type
    if kind not in STREAMS:
        raise UserError(f"model.backbone: sp3 cannot project '{kind}'; it can: {', '.join(STREAMS)}")
    if not getattr(config, "share_att_key", True):
        raise UserError(
            "model.backbone: sp3 cannot project a DeBERTa whose positions have projections of their own; valid: "
            "share_att_key true (v3)"
        )
    if kind == "bart":
        for what in ("attention_heads", "ffn_dim"):
            sizes = [getattr(config, f"{stack}_{what}") for stack in ("encoder", "decoder")]
            if sizes[0] != sizes[1]:
                raise UserError(f"model.backbone: sp3 needs encoder_{what} and decoder_{what} alike, not {sizes}")
    if group < 1:
        raise UserError(f"prune.group: {group} is below 1, the smallest valid value")
    if group > 1 and not STREAMS[kind].before:
        raise UserError(f"prune.group: {group}; the norms of {kind} stand after the blocks, valid is 1")
