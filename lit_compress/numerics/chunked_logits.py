"""Logits over a vocabulary that are computed in chunks of positions, when a loss needs them.

The logits [b, tokens, vocabulary] of a batch are by far the largest tensor of a language model's step, and every loss
makes several of that size. Here a loss gets the logits of one chunk at a time and returns a number per position. The
backward pass computes the logits of a chunk again, so no tensor has the size of the batch's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

POSITIONS = 2048  # most positions of a chunk
ELEMENTS = 1 << 25  # most logits of a chunk, those of all models together: 134 MB in float32


@dataclass(frozen=True, eq=False)
class ChunkedLogits:
    """Logits [b, tokens, vocabulary] that are not computed yet.

    Attributes:
        states: [b, tokens, width], the inputs of the output layer.
        layer: function from states [n, width] to logits [n, vocabulary].
        vocabulary: number of logits per position.
    """

    states: Tensor
    layer: Callable[[Tensor], Tensor]
    vocabulary: int

    def __len__(self) -> int:
        """Return the number of examples, b."""
        return len(self.states)

    def chunk(self, chunks: int) -> list[ChunkedLogits]:
        """Return equal parts of the batch, one after the other, as ``Tensor.chunk`` does."""
        return [replace(self, states=states) for states in self.states.chunk(chunks)]


Logits = Tensor | ChunkedLogits


def joined(first: Logits, second: Logits) -> Logits:
    """Return the logits of two batches of one model as the logits of one batch."""
    if isinstance(first, ChunkedLogits) and isinstance(second, ChunkedLogits):
        return replace(first, states=torch.cat([first.states, second.states]))
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    return torch.cat([first, second])


def position_losses(
    losses: Callable[..., Sequence[Tensor]],
    logits: Sequence[ChunkedLogits],
    columns: Sequence[Tensor],
    counted: Tensor | None = None,
) -> list[Tensor]:
    """Return losses [b, tokens] of every position, 0 at positions that do not count.

    On a CPU, positions that do not count are left out. Other devices compute them too, because the host would have to
    wait for their number.

    Args:
        losses: function from the logits of a chunk, [n, vocabulary] in float32 (float64 for float64 logits) for each of
            ``logits``, and the values [n] of each of ``columns``, to some losses [n]. It runs without autocast.
        logits: of one batch, by one or several models.
        columns: each [b, tokens], e.g. the labels.
        counted: bool [b, tokens]; None: all positions count.
    """
    shape = logits[0].states.shape[:2]
    inputs = [*(part.states.flatten(0, 1) for part in logits), *(column.flatten() for column in columns)]
    chosen = None
    if counted is not None and counted.device.type == "cpu" and not counted.all():
        chosen = counted.flatten().nonzero()[:, 0]
        inputs = [each[chosen] for each in inputs]
    size = max(1, min(POSITIONS, ELEMENTS // sum(part.vocabulary for part in logits)))
    layers = [part.layer for part in logits]

    def run(*chunk: Tensor) -> tuple[Tensor, ...]:
        kind = chunk[0].device.type
        # without the cache, the gradient of the layer is summed over the chunks in the precision of its weight
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
            values = [layer(states) for layer, states in zip(layers, chunk, strict=False)]
        with torch.autocast(kind, enabled=False):
            values = [each if each.dtype == torch.float64 else each.float() for each in values]
            return tuple(losses(*values, *chunk[len(layers) :]))

    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    chunks = [
        checkpoint(run, *chunk, **again) if torch.is_grad_enabled() else run(*chunk)
        for chunk in zip(*(each.split(size) for each in inputs), strict=True)
    ]
    values = [torch.cat(each) for each in zip(*chunks, strict=True)]
    if chosen is not None:
        values = [each.new_zeros(shape.numel()).index_copy(0, chosen, each) for each in values]
    elif counted is not None and counted.device.type != "cpu":
        values = [each.where(counted.flatten(), 0.0) for each in values]
    return [each.view(shape) for each in values]


def summed_linear(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that is ``layer`` on states [n, in]; all its uses add to one gradient of the weight in place.

    Autograd makes a gradient of the weight's size for every use and adds them up, which takes three such tensors at a
    time, each over a large vocabulary maybe as large as the rest of the model. Call it again for every forward. Layers
    that are no plain trained Linear, and a Linear with hooks, are returned as they are.
    """
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return layer
    if type(layer.weight) is not nn.Parameter or not (layer.weight.requires_grad and torch.is_grad_enabled()):
        return layer  # sharded, or not trained
    total: list[Tensor] = []
    weight, bias = _Sum.apply(layer.weight, total), layer.bias

    def product(states: Tensor) -> Tensor:
        outputs: Tensor = _Product.apply(states, weight, total)  # type: ignore[assignment]
        return outputs if bias is None else outputs + bias.to(outputs.dtype)

    return product


class _Sum(torch.autograd.Function):
    """The weight for all uses. Its backward runs after all uses' backwards, and returns their sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: None) -> tuple[Tensor | None, None]:
        return ctx.total.pop() if ctx.total else None, None


class _Product(torch.autograd.Function):
    """states [n, in] x weight [out, in]^T; the weight's gradient is added to ``total``."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, total: list[Tensor]) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.total = total
        return F.linear(states, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        states, weight = ctx.saved_tensors
        if not ctx.total:
            ctx.total.append(torch.zeros_like(weight))
        (total,) = ctx.total
        left, right = gradient.T, states.to(gradient.dtype)
        if total.dtype == gradient.dtype:
            total.addmm_(left, right)
        else:  # under autocast
            total.add_(left @ right)
        wanted = ctx.needs_input_grad[0]
        return (gradient @ weight.to(gradient.dtype)).to(states.dtype) if wanted else None, None, None
