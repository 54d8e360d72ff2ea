"""A Linear that is used for many chunks, whose weight gets one gradient: every chunk adds to it in place.

Autograd makes a gradient of the weight's size for every use and adds them up, which takes three such tensors at a time.
For an output layer over a large vocabulary each of them can be as large as the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def summed_linear(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that is ``layer`` on states [n, in]; of a plain Linear that is trained, as the file says.

    Call it again for every forward. Other layers, and a Linear with hooks, are returned as they are.
    """
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return layer
    if type(layer.weight) is not nn.Parameter or not (layer.weight.requires_grad and torch.is_grad_enabled()):
        return layer  # sharded, or not trained
    total: list[Tensor] = []
    weight, bias = _Sum.apply(layer.weight, total), layer.bias
    return lambda states: _add_bias(_Product.apply(states, weight, total), bias)  # type: ignore[arg-type]


def _add_bias(outputs: Tensor, bias: Tensor | None) -> Tensor:
    return outputs if bias is None else outputs + bias.to(outputs.dtype)


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
