"""The projections of a net from second moments of its hidden states on some training tokens (SP3, section 3.1).

A number of tokens is drawn from all real tokens of the examples; every module sees the same ones. Grams are summed in
float64 while the batches go by, so memory does not depend on the number of tokens. Nothing depends on how examples are
put into batches, on padding, or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_compress.errors import UserError
from lit_compress.families import head_width
from lit_compress.kinds.base import inputs_of
from lit_compress.projected import Bases, has_head_projections, identity_bases
from lit_compress.projections import centred_axes, principal_axes, query_key_projections
from lit_compress.streams import Block, layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPONENTS = "components.safetensors"  # beside a net: "shares" of :func:`bases_of`


@dataclass(frozen=True)
class Grams:
    """Sums of x x^T over the same tokens, float64.

    Attributes:
        sites: [sites, d, d], of the inputs of the norms of every site that can be turned.
        heads: [attentions, 3, heads, d_h, d_h], of queries, keys and values with their biases, over all uses of an
            attention; no attentions where heads cannot be projected.
        tokens: how many, in each stack of blocks.
    """

    sites: Tensor
    heads: Tensor
    tokens: int


def draw_tokens(lengths: Tensor, tokens: int, seed: int) -> list[Tensor]:
    """Return which of every example's real tokens are taken, bool [length] each.

    Args:
        lengths: int [examples].
        tokens: how many are drawn without replacement from all; all if there are fewer.
        seed: of the draw.
    """
    total = int(lengths.sum())
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:tokens]] = True
    return list(chosen.split(lengths.tolist()))


Batch = dict[str, Tensor]


@torch.no_grad()
def collect_grams(
    net: PreTrainedModel,
    batches: Iterable[Batch],
    tokens: int,
    seed: int = 0,
    group: int = 1,
    inputs: Callable[[Batch], Batch] = inputs_of,
    masks: Callable[[Batch], Sequence[Tensor]] = lambda batch: [batch["attention_mask"]],
    reduce: Callable[[Tensor], object] | None = None,
    show: Callable[[list[Batch]], Iterable[Batch]] = iter,
) -> Grams:
    """Put the examples through ``net`` and sum the Grams at its sites and heads.

    Args:
        net: dense, not wrapped; runs where it is, in evaluation mode and its own dtype.
        batches: examples with ``index`` 0 .. n - 1, each once (over all ranks); -1 only fills up.
        tokens: how many are drawn, in each stack of blocks.
        seed: of the draw.
        group: blocks that share a site, see :func:`~lit_compress.streams.layout`.
        inputs: what of a batch the net is called with.
        masks: where the tokens of a batch are, [batch, length] each, not 0: of the first stack, of one after it.
        reduce: in-place all-reduce (SUM) of a tensor over ranks with other examples.
        show: wraps the list of batches, e.g. with a progress bar.

    Raises:
        UserError: there are fewer tokens than dimensions, or an activation is inf or NaN.
    """
    kept = list(batches)
    count = torch.tensor([1 + max((int(b["index"].max()) for b in kept), default=-1)], device=net.device)
    if reduce is not None:  # the largest over the ranks is at most the sum
        reduce(count)
    sums, flags = _Sums(net, group), []
    for stack in range(len(sums.stacks)):
        lengths = torch.zeros(int(count), dtype=torch.int64, device=net.device)
        for batch in kept:
            real = batch["index"] >= 0
            found = masks(batch)[stack].ne(0).sum(1)[real]
            lengths[batch["index"][real].to(net.device)] = found.to(net.device)
        if reduce is not None:
            reduce(lengths)
        flags.append(draw_tokens(lengths.cpu(), tokens, seed))
        taken, d = min(tokens, int(lengths.sum())), net.config.hidden_size
        if taken < d:
            raise UserError(
                f"calibration.tokens: {taken} tokens are fewer than the {d} dimensions; "
                + (
                    f"give at least {d}"
                    if tokens < d
                    else f"the examples have no more, give at least {d} by more examples"
                )
            )
    faster = _OneDNN() if net.device.type == "cpu" and torch.backends.mkldnn.is_available() else nullcontext()
    with sums.watch(), torch.autocast(net.device.type, enabled=False), faster:
        for batch in show(kept):
            sums.begin([_chosen(batch, mask, flag) for mask, flag in zip(masks(batch), flags, strict=False)])
            net(**{name: value.to(net.device) for name, value in inputs(batch).items()})
    if reduce is not None:
        reduce(sums.sites)
        reduce(sums.heads)
    return Grams(sums.sites.cpu(), sums.heads.cpu(), taken)


def _chosen(batch: Batch, mask: Tensor, flags: list[Tensor]) -> Tensor:
    """Return which tokens of a batch were drawn, bool [batch * length]."""
    mask = mask.bool()
    chosen = torch.zeros_like(mask)
    for row, index in enumerate(batch["index"].tolist()):
        if index >= 0:
            chosen[row, mask[row]] = flags[index].to(mask.device)
    return chosen.flatten()


class _OneDNN(TorchFunctionMode):
    """Let oneDNN do the float32 products of Linears on a CPU: float32 too, and MKL is slower at them on AMD's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and args[0].dtype == torch.float32:
            return func(args[0].to_mkldnn(), *args[1:], **(kwargs or {})).to_dense()
        return func(*args, **(kwargs or {}))


class _Sums:
    """The sums, and the hooks that add to them."""

    def __init__(self, net: PreTrainedModel, group: int) -> None:
        self.net, self.parts = net, layout(net, group)
        self.stacks = list(dict.fromkeys(place.stack for place in self.parts.sites))
        heads, d, wide = net.config.num_attention_heads, net.config.hidden_size, head_width(net, "encoder")
        self.attentions = self.parts.attentions if has_head_projections(net) else []
        options = {"dtype": torch.float64, "device": net.device}
        self.sites = torch.zeros(len(self.parts.turnable), d, d, **options)
        self.heads = torch.zeros(len(self.attentions), 3, heads, wide, wide, **options)

    def begin(self, chosen: list[Tensor]) -> None:
        """Take the tokens ``chosen``, bool [batch * length] per stack, of the next forward."""
        self.chosen = {s: c.to(self.net.device) for s, c in zip(self.stacks, chosen, strict=True)}
        self.seen: set[tuple[int, int]] = set()

    def _site(self, i: int, x: Tensor) -> None:
        taken = x.flatten(0, -2)[self.chosen[self.parts.sites[i].stack]].double()
        self.sites[i] += taken.mT @ taken

    def _heads(self, i: int, block: Block, role: str, y: Tensor) -> None:
        kind = "qkv".index(role)
        if (i, kind) in self.seen and getattr(self.net.config, "relative_attention", False):
            return  # DeBERTa puts its relative positions through afterwards
        self.seen.add((i, kind))
        stack = self.parts.sites[block.roles[role]].stack
        taken = y.flatten(0, -2)[self.chosen[stack]].double()
        heads = taken.unflatten(1, (self.heads.shape[2], -1)).transpose(0, 1)
        self.heads[i, kind] += heads.mT @ heads

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Hook every site and every q, k, v; evaluation mode; then everything as it was."""
        modes = [(module, module.training) for module in self.net.modules()]
        self.net.eval()
        handles = []
        for i, place in enumerate(self.parts.turnable):
            for name in place.norms:
                norm = self.net.get_submodule(name)
                handles.append(norm.register_forward_pre_hook(lambda _, args, i=i: self._site(i, args[0])))
        for i, block in enumerate(self.attentions):
            for role in "qkv":
                layer: nn.Module = self.net.get_submodule(block.linears[role])
                hook = lambda _, args, y, i=i, block=block, role=role: self._heads(i, block, role, y)  # noqa: E731
                handles.append(layer.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, mode in modes:
                module.training = mode


def bases_of(grams: Grams, ridge: float = 1e-6, centred: bool = True) -> tuple[Bases, Tensor]:
    """Return the projections, and every site's energy per direction, falling, [sites, d], which sum to 1.

    Args:
        grams: of :func:`collect_grams`.
        ridge: of queries and keys, see :func:`~lit_compress.projections.query_key_projections`.
        centred: False for the authors' axes, of inputs with their mean (P_in without R).
    """
    found = [(centred_axes if centred else principal_axes)(gram) for gram in grams.sites]
    query, key, value = [], [], []
    for q, k, v in grams.heads:
        pairs = [query_key_projections(a, b, ridge) for a, b in zip(q, k, strict=True)]
        query.append(torch.stack([pair.query for pair in pairs]))
        key.append(torch.stack([pair.key for pair in pairs]))
        value.append(principal_axes(v)[0].mT.contiguous())
    shares = torch.zeros(grams.sites.shape[:2], dtype=torch.float64)
    for row, (_, energy) in zip(shares, found, strict=True):
        row.copy_(energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny))
    return Bases([axes for axes, _ in found], query, key, value), shares


def shared_bases(net: PreTrainedModel, make: Callable[[], Bases], group: int = 1) -> Bases:
    """Return the projections that rank 0 makes, on every rank of the default process group.

    Eigenvectors of equal eigenvalues differ between machines.
    """
    distributed = torch.distributed
    bases = make() if distributed.get_rank() == 0 else identity_bases(net, group)
    received = []
    for part in (bases.sites, bases.query, bases.key, bases.value):
        tensors = [tensor.contiguous().to(net.device) for tensor in part]
        for tensor in tensors:
            distributed.broadcast(tensor, 0)
        received.append([tensor.cpu() for tensor in tensors])
    return Bases(*received)
