"""Sequential refit of a factorized model: every left factor is fitted again to the inputs that compressed blocks give.

Behind a compressed block a matrix reads x' where the dense model's reads x. Block by block, from the first, the moments

    A' = E[x' x'^T],   B = E[x x'^T],   m = E[x],   m' = E[x']

are taken over the tokens of all examples, and the left factors and biases follow equation (R) of numerics/refit.py
(second-order compression, section 6). Right factors and matrices that are not factorized stay. Within a block the
moments are those before its own refit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.uses import (
    Batch,
    Stop,
    Uses,
    frozen,
    hooked,
    loose_uses,
    mask_of,
    real_rows,
    token_places,
    tokens_at,
)
from lit_compress.layers import LowRankLinear, StackedLowRankLinear
from lit_compress.models.sites import Site, find_sites, shared_inputs
from lit_compress.numerics.kronecker import corrected_bias
from lit_compress.numerics.refit import REFIT_DAMPING, refit_left
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Pairs:
    """The sums of one input: x' x'^T, x x'^T [in, in], and of x, x' and their number, [2, in] and a count.

    Args:
        size: in.
        like: a tensor with the dtype and the device of the sums.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        self.gram, self.cross = like.new_zeros(size, size), like.new_zeros(size, size)
        self.sums = torch.zeros(2, size, dtype=torch.float64, device=place_of_sums(like.device))
        self.tokens = like.new_zeros(1, dtype=torch.int64)

    def add(self, x: Tensor, new: Tensor) -> None:
        """Add x and x' [tokens, in]."""
        self.gram += new.mT @ new
        self.cross += x.mT @ new
        self.sums += torch.stack([double(x).sum(0), double(new).sum(0)])
        self.tokens += len(x)

    def moments(self, reduce: Callable[[Tensor], object] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A', B [in, in], m and m' [in], float64 on the CPU, over the examples of all ranks."""
        totals = (self.gram, self.cross, self.sums, self.tokens)
        for total in totals if reduce is not None else ():
            reduce(total)  # type: ignore[misc]
        gram, cross, sums = (total.cpu().double() / int(self.tokens) for total in totals[:3])
        return gram, cross, sums[0], sums[1]


def refit_net(
    dense: PreTrainedModel,
    net: PreTrainedModel,
    batches: Callable[[], Iterable[Batch]],
    kind: TaskType | str,
    *,
    centred: frozenset[str] = frozenset(),
    damping: float = REFIT_DAMPING,
    reduce: Callable[[Tensor], object] | None = None,
) -> None:
    """Refit the left factors and the biases of ``net`` in place, block by block.

    Args:
        dense: the model that was factorized; both models are on the device of the passes.
        net: ``dense`` with some of its Linears replaced by low-rank layers.
        batches: function that returns the calibration batches again; called once per block.
        kind: of the task; or its name, for the usual one.
        centred: sites whose bias takes over the means of the inputs.
        damping: share of the mean of the diagonal of R A' R^T, which draws to the factor as it is.
        reduce: in-place all-reduce (SUM) over ranks with other examples.

    Raises:
        UserError: the moments are not finite, or singular after the damping.
    """
    blocks: dict[tuple[str, int], list[Site]] = {}
    for site in find_sites(net):
        blocks.setdefault((site.stack, site.layer), []).append(site)
    ends = [sites[0].name for sites in list(blocks.values())[1:]] + [None]
    todo = track(list(zip(blocks.values(), ends, strict=True)), "refit", len(blocks))
    for sites, end in todo:
        low = {s.name: s for s in sites if isinstance(net.get_submodule(s.name), LowRankLinear | StackedLowRankLinear)}
        if low:
            moments_of = _moments(dense, net, batches(), task_type(kind), low, end)
            for names, pairs in moments_of.values():
                moments = pairs.moments(reduce)
                for name in names:
                    _refit(dense.get_submodule(name), net.get_submodule(name), moments, name in centred, damping, name)


@torch.no_grad()
def _refit(old: Any, new: Any, moments: tuple[Tensor, ...], centred: bool, damping: float, name: str) -> None:
    """Set the left factor of ``new``, and its bias if it is centred, by the moments of :meth:`_Pairs.moments`."""
    gram, cross, mean, new_mean = moments
    if centred:
        gram, cross = gram - new_mean[:, None] * new_mean, cross - mean[:, None] * new_mean
    left, right = new.factors()
    left.copy_(refit_left(old.weight, left, right, gram, cross, damping, name))
    if centred:
        new.bias.copy_(corrected_bias(old.bias, old.weight, left @ right, mean, new_mean))


def _moments(
    dense: PreTrainedModel,
    net: PreTrainedModel,
    batches: Iterable[Batch],
    task: TaskType,
    sites: dict[str, Site],
    end: str | None,
) -> dict[str, tuple[list[str], _Pairs]]:
    """Return {first site: (all of ``sites`` that read the same input, its sums)}.

    Args:
        dense, net: as for :func:`refit_net`.
        batches: of examples.
        task: gives inputs and masks.
        sites: of one block, by name.
        end: name of the first site of the next block, where forwards stop; None: they go on to the end.
    """
    groups = [[name for name in group if name in sites] for group in shared_inputs(net)]
    like = next(net.parameters()).detach()
    moments_of = {g[0]: (g, _Pairs(net.get_submodule(g[0]).in_features, like)) for g in groups if g}  # type: ignore[arg-type]
    leaders, loose = {name: sites[name] for name in moments_of}, None
    with frozen(dense), frozen(net), torch.no_grad(), torch.autocast(net.device.type, enabled=False):
        for batch in batches:
            rows = real_rows(task, batch, net.device, None)
            if not len(rows["index"]):
                continue
            loose = loose_uses(dense, task, rows, leaders) if loose is None else loose
            old, new = (_inputs(some, task, rows, leaders, loose, end) for some in (dense, net))
            for name, (_, pairs) in moments_of.items():
                for x, other in zip(old[name], new[name], strict=True):
                    pairs.add(x, other)
    return moments_of


def _inputs(
    net: PreTrainedModel, task: TaskType, rows: Batch, sites: dict[str, Site], loose: Uses, end: str | None
) -> dict[str, list[Tensor]]:
    """Return the inputs [tokens, in] of every use of ``sites`` in a forward that stops before ``end``."""
    places = [token_places(mask) for mask in task.masks(rows)]
    inputs: dict[str, list[Tensor]] = {name: [] for name in sites}

    def on_forward(name: str, x: Tensor, _: Tensor) -> None:
        mask = None if len(inputs[name]) in loose[name] else mask_of(sites[name], places)
        inputs[name].append(tokens_at(x, mask))

    def stop(module: nn.Module, args: Any) -> None:
        raise Stop

    handle = net.get_submodule(end).register_forward_pre_hook(stop) if end else None
    try:
        with hooked(net, sites, on_forward), suppress(Stop):
            task.run(net, rows)
    finally:
        if handle is not None:
            handle.remove()
    return inputs
