"""Watch the modules of a model in a forward: hooks, the tokens that count, and state that a forward must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.models.sites import Site
from lit_compress.tasks import TaskType
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.numerics.sampled_labels import Labels

Batch = dict[str, Tensor]  # the columns of some examples
Uses = dict[str, set[int]]  # site -> numbers of its uses in a forward


class Stop(Exception):
    """Ends a forward at a module."""


@contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    """Set evaluation mode and no gradients for parameters inside the context; restore both afterwards."""
    modes = [(module, module.training) for module in net.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    net.eval().requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, value in wanted:
            parameter.requires_grad_(value)


@contextmanager
def hooked(modules: Mapping[str, nn.Module], on_forward: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``on_forward(name, input, output)`` at every use of the modules."""

    def hook(name: str) -> Any:
        return lambda _, args, output: on_forward(name, args[0], output)

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def real_rows(task: TaskType, batch: Batch, device: torch.device, labels: Labels | None) -> Batch:
    """Return the columns of ``batch`` on ``device``, without the rows whose ``index`` is -1, which only fill it up.

    A UserError if ``labels`` are the true ones, and the batch has none.
    """
    needed = labels == "true" and task.loss != "vectors"  # vectors have no labels
    if "labels" not in batch and (needed or task.reads_labels):
        hint = "this task's models read them" if task.reads_labels else "drawn labels need none"
        raise UserError(f"labels: the data has none, only {', '.join(batch)}; {hint}")
    real = batch["index"] >= 0
    return {name: column[real].to(device) for name, column in batch.items()}


def row_parts(task: TaskType, rows: Batch, tokens: int) -> Iterator[Batch]:
    """Yield ``rows`` in parts of at most ``tokens`` tokens, padding and a decoder's included; one example at least."""
    examples = len(next(iter(rows.values())))
    masks = {id(mask): mask for mask in task.masks(rows)}.values()  # one of the two stacks is often the same
    count = max(1, tokens // sum(mask.shape[1] for mask in masks)) if examples else 1
    for start in range(0, examples, count):
        yield {name: column[start : start + count] for name, column in rows.items()}


def token_places(mask: Tensor) -> Tensor:
    """Return the numbers of the positions that are not 0 in ``mask``, int64; the host waits for how many there are."""
    return mask.flatten().nonzero()[:, 0]


def tokens_at(x: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows [tokens, n] of ``x`` [b, length, n] or [b * length, n] at ``places``, by default all."""
    x = x.reshape(-1, x.shape[-1])
    return x if places is None else x.index_select(0, places)


def mask_of(site: Site, masks: Sequence[Tensor]) -> Tensor:
    """Return where tokens are in the inputs of ``site``: of the first stack, or of a decoder."""
    of_encoder = site.stack == "encoder" or (site.cross and site.role in ("k", "v"))
    return masks[0 if of_encoder else 1]


def belongs_to_rows(x: Tensor, mask: Tensor) -> bool:
    """Return whether the first axis of ``x`` is the one of ``mask`` [b, length], or both axes flattened (OPT)."""
    return x.shape[0] == len(mask) or (x.ndim == 2 and len(x) == mask.numel())


@torch.no_grad()
def loose_uses(net: PreTrainedModel, task: TaskType, rows: Batch, sites: dict[str, Site]) -> Uses:
    """Return the uses of every site whose inputs belong to no row of a batch: DeBERTa's relative positions.

    Found in a forward of the first row, twice.
    """
    twice = {name: torch.cat([column[:1]] * 2) for name, column in rows.items()}
    masks = task.masks(twice)
    number, loose = dict.fromkeys(sites, 0), {name: set[int]() for name in sites}

    def on_forward(name: str, x: Tensor, _: Tensor) -> None:
        if not belongs_to_rows(x, mask_of(sites[name], masks)):
            assert x.shape[0] == 1, (name, x.shape)
            loose[name].add(number[name])
        number[name] += 1

    with hooked({name: net.get_submodule(name) for name in sites}, on_forward):
        task.run(net, twice)
    return loose
