"""Empirical Fisher information of Linears, summed over rows or columns: exact, in the time of about one training step.

Hsu et al. 2022, "Language Model Compression with Weighted Low-Rank Factorization", Eq. 3, per example d_i:

    I_w = 1/|D| sum_i (dL(d_i; w) / dw)^2

Example s gives a Linear the inputs X_s [tokens, in] and, at its outputs, the gradients D_s [tokens, out]. One backward
pass for the whole batch computes them, without a gradient of any weight. The example's gradient of the weight is
G_s = D_s^T X_s [out, in]; with few tokens, the sums of its squares are cheaper without forming it:

    sum_o G[o, j]^2 = sum_t X[t, j] (K X)[t, j],   K = D D^T [tokens, tokens]
    sum_j G[o, j]^2 = sum_t D[t, o] (H D)[t, o],   H = X X^T [tokens, tokens]

The gradient of a matrix that is used several times in a forward is the sum over its uses, squared afterwards: the uses
are concatenated on the token axis. Vectors have no labels; a target is drawn around each (sampled_labels.py, N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lit_compress.numerics.decompose import Axis, Importance
from lit_compress.numerics.losses import example_losses
from lit_compress.numerics.ranks import break_even_rank
from lit_compress.numerics.sampled_labels import fisher_losses
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.devices import place_of_sums
from lit_compress.utils.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Estimator = Literal["per_example", "batch"]
Pair = tuple[Tensor, Tensor]  # inputs [groups, tokens, in] and gradients [groups, tokens, out] of one use of a Linear

TOKENS = 512  # of one forward of a language model, padding included; the graph of more takes gigabytes
_CHUNK, _CHUNK_CPU = 1 << 26, 1 << 20  # most elements of a temporary tensor; on a CPU, those that fit a core's cache


@dataclass(frozen=True)
class Fisher:
    """Mean over the examples of the squared gradient G [out, in] of one matrix. Float64, on the CPU.

    Attributes:
        rows: [out], sum over the columns of G ** 2.
        columns: [in], sum over the rows of G ** 2; the weights of FWSVD.
        elements: [out, in], G ** 2 itself; None unless it was asked for.
    """

    rows: Tensor
    columns: Tensor
    elements: Tensor | None = None

    def importance(self, axis: Axis) -> Importance:
        """Return the importance for ``axis``, as :func:`lit_compress.numerics.decompose.decompose` takes it.

        Spread over the elements, the importance of every axis has the same sum, so that weighted singular values of
        several matrices are on one scale (ranks.py).
        """
        (out,), (inner,) = self.rows.shape, self.columns.shape
        match axis:
            case "in":
                return self.columns / out
            case "out":
                return self.rows / inner
            case "both":  # of independent rows and columns: F_ij = rows_i * columns_j / sum
                return self.rows, self.columns / self.columns.sum().clamp_min(torch.finfo(torch.float64).tiny)
        assert self.elements is not None, "estimate_fisher(elements=True)"
        return self.elements


def estimate_fisher(
    net: PreTrainedModel,
    batches: Iterable[dict[str, Tensor]],
    kind: TaskType | str,
    sites: Sequence[str],
    *,
    estimator: Estimator = "per_example",
    elements: bool = False,
    reduce: Callable[[Tensor], object] | None = None,
) -> dict[str, Fisher]:
    """Return {site: Fisher information of its matrix} on the examples of ``batches``.

    The net runs on its device, in evaluation mode and its own dtype (float32 or float64), not wrapped by any strategy;
    afterwards modes, ``requires_grad``, gradients and hooks are as before.

    Args:
        net: a fine-tuned net with its task's head.
        batches: as :class:`lit_compress.data.datamodule.PaddedBatches` makes them, with labels. Rows whose ``index`` is
            -1 are left out. Ranks may have different numbers of batches; an example should be on one rank only.
        kind: of the task; or its name, for the usual one.
        sites: names of Linears.
        estimator: ``per_example`` squares each example's gradient (Eq. 3). ``batch`` squares the mean gradient of each
            batch and averages over batches, as re-implementations do: mu^2 + var / batch instead of mu^2 + var.
        elements: True to return the element-wise values too, which takes 8 bytes per weight.
        reduce: in-place all-reduce (SUM) of a float64 vector over ranks with other examples; called once, at the end.

    Raises:
        UserError: a site is no Linear of the net, a batch has no labels, there are no examples, or a gradient is inf or
            NaN.
    """
    linears = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    if not sites:
        raise UserError(f"sites: none was named; {nearest('', linears)}")
    for name in sites:
        if name not in linears:
            raise UserError(f"sites: '{name}' is no Linear of the net; {nearest(name, linears)}")
    assert net.dtype in (torch.float32, torch.float64), net.dtype
    watched = {name: linears[name] for name in sites}
    sizes = [m.weight.numel() if elements else sum(m.weight.shape) for m in watched.values()]
    totals = torch.zeros(1 + sum(sizes), dtype=torch.float64, device=place_of_sums(net.device))
    count, parts = totals[:1], totals[1:].split(sizes)  # views of one vector, so that one reduction serves all
    sums = {
        name: Squares(part, module.weight.shape, elements)
        for (name, module), part in zip(watched.items(), parts, strict=True)
    }
    with _frozen(net), torch.enable_grad(), torch.autocast(net.device.type, enabled=False):
        task = task_type(kind)
        long = task.over_vocabulary and estimator == "per_example"
        for batch in batches:
            rows = _rows(batch, net.device, task.loss == "vectors")
            for part in row_parts(task, rows, TOKENS) if long else [rows]:
                groups = len(part["input_ids"]) if estimator == "per_example" else min(1, len(part["input_ids"]))
                if groups == 0:
                    continue
                count += groups
                mixed = _collect(net, part, kind, watched, groups, sums)
                for i in range(groups) if mixed else ():
                    row = {name: column[i : i + 1] for name, column in part.items()}
                    _collect(net, row, kind, mixed, 1, sums)
    if reduce is not None:
        reduce(totals)
    if not count:
        raise UserError("fisher: there are no examples to estimate from; give at least 1")
    return {name: part.mean(name, float(count)) for name, part in sums.items()}


class Squares:
    """Sums of squared gradients of one matrix.

    Args:
        part: zeros, where they are kept: by rows and columns [out + in], with ``elements`` [out * in].
        shape: of the matrix.
        elements: whether those of every element are kept.
    """

    def __init__(self, part: Tensor, shape: torch.Size, elements: bool) -> None:
        self.shape, self.elements = shape, part.view(shape) if elements else None
        if not elements:
            self.rows, self.columns = part.split(list(shape))

    @classmethod
    def empty(cls, shape: torch.Size) -> Squares:
        """Return sums by rows and columns of a matrix of this shape, on the CPU."""
        return cls(torch.zeros(sum(shape), dtype=torch.float64), shape, False)

    def add(self, uses: Sequence[Pair]) -> None:
        """Add the squares of every group's gradient, which is the sum over the uses."""
        groups, tokens = uses[0][0].shape[0], sum(x.shape[1] for x, _ in uses)
        gram = self.elements is None and tokens < break_even_rank(*self.shape)
        size = tokens * (tokens + max(self.shape)) if gram else self.shape.numel()
        step = max(1, (_CHUNK_CPU if uses[0][0].device.type == "cpu" else _CHUNK) // size)
        for start in range(0, groups, step):
            x, delta = (_joined([pair[side][start : start + step] for pair in uses]) for side in (0, 1))
            if gram:
                _add(self.columns, ((delta @ delta.mT) @ x).mul_(x).sum((0, 1)))
                _add(self.rows, ((x @ x.mT) @ delta).mul_(delta).sum((0, 1)))
                continue
            squares = (delta.mT @ x).square_().sum(0)
            if self.elements is not None:
                _add(self.elements, squares)
            else:
                _add(self.rows, squares.sum(1))
                _add(self.columns, squares.sum(0))

    def mean(self, name: str, count: float) -> Fisher:
        """Divide by the number of groups."""
        if self.elements is not None:
            elements = (self.elements / count).cpu()
            rows, columns = elements.sum(1), elements.sum(0)
        else:
            elements = None
            # the Gram form may round a zero to something negative
            rows, columns = ((total / count).clamp_min(0).cpu() for total in (self.rows, self.columns))
        if not (rows.isfinite().all() and columns.isfinite().all()):
            raise UserError(f"fisher: gradients at '{name}' are inf or NaN; give a net with a finite loss on this data")
        return Fisher(rows, columns, elements)


def _add(total: Tensor, part: Tensor) -> None:
    """Add ``part`` to ``total``, which is on the CPU if the device has no float64."""
    total += part.to(total.device)


def row_parts(task: TaskType, rows: dict[str, Tensor], tokens: int) -> Iterator[dict[str, Tensor]]:
    """Yield ``rows`` in parts of at most ``tokens`` tokens, padding and a decoder's included; one example at least."""
    examples = len(next(iter(rows.values())))
    masks = {id(mask): mask for mask in task.masks(rows)}.values()  # one of the two stacks is often the same
    count = max(1, tokens // sum(mask.shape[1] for mask in masks)) if examples else 1
    for start in range(0, examples, count):
        yield {name: column[start : start + count] for name, column in rows.items()}


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _rows(batch: dict[str, Tensor], device: torch.device, drawn: bool) -> dict[str, Tensor]:
    """Return the columns of ``batch`` on ``device``, without rows that only fill up the batch (``index`` -1).

    ``drawn``: labels are drawn, none are needed.
    """
    if "labels" not in batch and not drawn:
        raise UserError(f"labels: the data has none, only {', '.join(batch)}; the Fisher information needs them")
    rows = {name: column.to(device) for name, column in batch.items()}
    index = rows.get("index")
    return rows if index is None else {name: column[index >= 0] for name, column in rows.items()}


@contextmanager
def _frozen(net: nn.Module) -> Iterator[None]:
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


def _collect(
    net: PreTrainedModel,
    rows: dict[str, Tensor],
    kind: TaskType | str,
    watched: dict[str, nn.Linear],
    groups: int,
    sums: dict[str, Squares],
) -> dict[str, nn.Linear]:
    """Do a forward and a backward pass of ``rows``, and add every matrix's squared gradients to its sums.

    A matrix is added as soon as the gradients at all its uses are known, which frees their memory.

    Args:
        net: frozen; the graph begins at the outputs of the first watched Linears.
        rows: a batch with labels, or with the index that they are drawn by.
        kind: type of the task.
        watched: the Linears, by site.
        groups: number of gradients to square: one per row, or 1 for the mean over the rows.
        sums: the sums to add to, by site.

    Returns:
        The Linears that were left out because some of their inputs belong to no single row (DeBERTa projects its
        relative positions to queries and keys once for the whole batch).
    """
    task = task_type(kind)
    inputs = task.inputs(net, rows)
    texts, length = inputs["input_ids"].shape
    uses: dict[str, list[Pair]] = {name: [] for name in watched}
    missing = dict.fromkeys(watched, 0)
    mixed: dict[str, nn.Linear] = {}

    def watch(name: str, module: nn.Linear) -> Any:
        def on_forward(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if groups > 1 and not _belongs_to_rows(output, texts, length):
                mixed[name] = module
                return
            read = [args[0].detach().reshape(groups, -1, module.in_features)]
            missing[name] += 1

            def on_gradient(gradient: Tensor) -> None:
                uses[name].append((read.pop(), gradient.reshape(groups, -1, module.out_features)))
                missing[name] -= 1
                if not missing[name]:
                    add(name)

            output.requires_grad_().register_hook(on_gradient)

        return module.register_forward_hook(on_forward)

    def add(name: str) -> None:
        found, uses[name] = uses[name], []
        if found and name not in mixed:
            sums[name].add(found)

    handles = [watch(name, module) for name, module in watched.items()]
    try:
        logits = task.logits(task.run(net, rows), rows)
        if task.loss == "vectors":
            (total,) = fisher_losses(logits, task.loss, "drawn", index=rows["index"])
        else:
            total = example_losses(logits, rows["labels"], task.loss).sum()
        loss = total * (groups / len(logits))
        if loss.requires_grad:
            loss.backward()
        for name in watched:  # some use may have had no influence on the loss
            add(name)
    finally:
        for handle in handles:
            handle.remove()
    return mixed


def _belongs_to_rows(x: Tensor, rows: int, length: int) -> bool:
    """Say whether the first axis of ``x`` is the batch, or batch and tokens flattened (OPT)."""
    return x.shape[0] == rows or (x.ndim == 2 and x.shape[0] == rows * length)
