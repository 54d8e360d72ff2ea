"""Statistics of the blocks' matrices on some examples: their sums, and the walk that collects them.

A statistic says which losses it takes the gradients of, and makes a collector. A collector sums over the uses of sites.
Two walks show it the uses, so every statistic goes both ways:

    whole (this file)          one forward and backward of the model in memory
    BlockStatistics (walk.py)  one block in memory at a time, the states between blocks on disk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_compress.models.sites import Model, Site, find_sites
from lit_compress.numerics.losses import example_losses
from lit_compress.numerics.sampled_labels import Labels, fisher_loss
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.errors import UserError

Batch = dict[str, Tensor]  # the columns of some examples
TOKENS = 512  # of one forward, padding included; one example at least. The graph of more takes gigabytes
Reduce = Callable[[Tensor], object] | None  # in-place all-reduce (SUM) over ranks with other examples


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


def real_rows(task: TaskType, batch: Batch, device: torch.device, labels: Labels | Literal["true"] | None) -> Batch:
    """Return the columns of ``batch`` on ``device``, without the rows whose ``index`` is -1, which only fill it up.

    A UserError if ``labels`` are the true ones, and the batch has none.
    """
    needed = labels == "true" and task.loss != "vectors"  # vectors have no labels
    if "labels" not in batch and (needed or task.reads_labels):
        hint = "this task's models read them" if task.reads_labels else "--method SecondOrder needs none"
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


class Collector(ABC):
    """Sums over the uses of some sites; ``by_token`` leaves padding out, else every use is a batch of examples."""

    examples = 0
    by_token: ClassVar[bool]

    @abstractmethod
    def use(self, name: str, x: Tensor, output: Tensor, where: Tensor | None, rows: int) -> None:
        """Take a use of site ``name``, and watch for the gradient by its output.

        The ``rows`` are examples; of a collector :attr:`by_token` texts, of which an example may have two. Inputs ``x``
        are [b, length, in] or [b * length, in]. ``where`` has the places of the tokens that count, int64, or None for
        all; it is None in a collector that is not :attr:`by_token`.
        """

    def end(self) -> None:  # noqa: B027
        """Take note that a pass has ended."""

    @abstractmethod
    def totals(self) -> Iterable[Tensor]:
        """Return all sums, which :meth:`reduce` adds over processes in place."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the result by site; only it has the sums afterwards. A UserError if something is inf or NaN."""

    def reduce(self, reduce: Callable[[Tensor], object], device: torch.device) -> None:
        """Sum everything over the ranks, on ``device``."""
        examples = torch.tensor([float(self.examples)], dtype=torch.float64)
        for total in (examples, *self.totals()):
            there = total.to(device)
            reduce(there)
            total.copy_(there)
        self.examples = int(examples)


@dataclass(frozen=True)
class Statistic(ABC):
    """Sums over the examples at the sites of a model.

    Attributes:
        labels: of the loss whose gradients are taken, ``true`` for the data's; None for no gradients, in forwards only.
        seed: of drawn labels, which depend on it and on an example's index.
        sites: names of those that are asked; None for all.
    """

    labels: Labels | Literal["true"] | None = "true"
    seed: int = 0
    sites: Sequence[str] | None = None
    title: ClassVar[str]  # in progress bars

    @abstractmethod
    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> Collector:
        """Return a collector for some sites of ``net``; only shapes are read, its sums are on ``device``."""

    def loss(self, task: TaskType, logits: Any, rows: Batch) -> Tensor:
        """Return the loss whose gradients are wanted: the examples' under true labels, vectors' under drawn ones."""
        if task.loss == "vectors":
            return fisher_loss(logits, task.loss, "drawn", index=rows["index"])
        return example_losses(logits, rows["labels"], task.loss).sum()

    def parts(self, task: TaskType, rows: Batch) -> Iterable[Batch]:
        """Return the rows of a batch in the parts in which they go through the model in memory."""
        return row_parts(task, rows, TOKENS)

    def bytes(self, net: Any, names: Sequence[str]) -> int:
        """Return how many bytes the sums of some sites take; only shapes are read."""
        return sum(total.numel() * total.element_size() for total in self.collector(net, names, "meta").totals())

    def names(self, net: Any) -> list[str]:
        """Return the names of the requested sites."""
        return [site.name for site in find_sites(net)] if self.sites is None else list(self.sites)


class OfModel(ABC):
    """Asked of the whole model, in passes of its own; no matrix has sums of its own."""

    @abstractmethod
    def answer(self, net: Model, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the answer for the examples of ``batches``, the same on every rank.

        ``net``, with its task's head, where it runs, is not changed; ``reduce`` is as in :func:`whole`.
        """


def whole(
    net: Model, statistic: Statistic, batches: Iterable[Batch], kind: TaskType | str, *,
    names: Sequence[str] | None = None, device: torch.device | str | None = None, reduce: Reduce = None,
) -> dict[str, Any]:  # fmt: skip
    """Return a statistic of the model in memory on the examples of ``batches``, from one forward and backward of each.

    The model runs where it is, in evaluation mode and its own dtype (float32 or float64), not wrapped by any strategy;
    afterwards modes, ``requires_grad``, gradients and hooks are as before.

    Args:
        batches: as :class:`lit_compress.data.datamodule.PaddedBatches` makes them, ``index`` included; rows whose index
            is -1 are left out. Ranks may have different numbers of batches; an example should be on one rank only.
        kind: of the task; or its name, for the usual one.
        names: of the matrices, some of those that are asked; None for all.
        device: where the sums are; None for where the model is.
        reduce: in-place all-reduce (SUM) over ranks with other examples; called at the end, for every sum.

    Raises:
        UserError: labels are missing, there are no examples, or something is inf or NaN.
    """
    assert net.dtype in (torch.float32, torch.float64), net.dtype
    task, names = task_type(kind), statistic.names(net) if names is None else names
    sums = statistic.collector(net, names, device or net.device)
    sites = {site.name: site for site in find_sites(net) if site.name in names}
    gradients = statistic.labels is not None
    # relative positions of DeBERTa belong to no example: their sites see the examples one by one
    shared = getattr(net.config, "relative_attention", False)
    with frozen(net), torch.set_grad_enabled(gradients), torch.autocast(net.device.type, enabled=False):
        for batch in batches:
            rows = real_rows(task, batch, net.device, statistic.labels)
            parts = row_parts(task, rows, 1) if shared else statistic.parts(task, rows)
            for part in parts if len(rows["index"]) else ():
                sums.examples += len(part["index"])
                with watched(net, sums, sites, task.masks(part), len(part["index"]), names):
                    output = task.run(net, part, logits=gradients)
                    if gradients and (loss := statistic.loss(task, task.logits(output, part), part)).requires_grad:
                        loss.backward()
                sums.end()
    if reduce is not None:
        sums.reduce(reduce, net.device)
    if not sums.examples:
        raise UserError("calibration: there are no examples; give at least 1")
    return sums.result()


@contextmanager
def watched(
    module: nn.Module, sums: Collector, sites: Mapping[str, Site], masks: Sequence[Tensor], examples: int,
    names: Collection[str] | None = None, start: str = "",
) -> Iterator[None]:  # fmt: skip
    """Show a collector every use of some modules in a forward of ``examples`` examples, inside.

    Args:
        module: the model, or a part of it, whose name with a dot is ``start``.
        sums, sites: collector, and sites by name in the model.
        masks: of the tokens of each stack.
        names: of the modules in the model; None: all ``sites``.
    """
    places = [token_places(mask) for mask in masks] if sums.by_token else [None] * len(masks)
    modules = {name: module.get_submodule(name.removeprefix(start)) for name in (sites if names is None else names)}
    used, twice = set[str](), getattr(getattr(module, "config", None), "relative_attention", False)

    def on_forward(name: str, x: Tensor, output: Tensor) -> None:
        site = sites.get(name)  # the tokens that it reads are of the decoder, or of the first stack
        stack = int(site is not None and site.stack == "decoder" and not (site.cross and site.role in ("k", "v")))
        # DeBERTa's queries and keys are used a second time, for its positions
        of_positions = (twice and name in used) or (sums.by_token and x.shape[:-1].numel() != masks[stack].numel())
        if len(x) % examples or (of_positions and not (twice and examples == 1)):
            raise UserError(
                f"calibration: '{name}' reads {tuple(x.shape)}, not the tokens of {examples} texts; choose a "
                "method without a calibration"
            )
        rows = len(masks[stack]) if sums.by_token and not of_positions else examples
        sums.use(name, x, output, None if of_positions else places[stack], rows)
        used.add(name)

    with hooked(modules, on_forward):
        yield
