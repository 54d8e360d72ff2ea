"""Language models run up to their output layer over the vocabulary, whose logits are then computed in chunks.

The model's own forward runs, with every hook and strategy around it. A hook keeps the inputs of the output layer and
lets the layer compute nothing. Some models change the logits behind that layer: Gemma limits them, BART adds a bias.
The first forward of every model checks that nothing else is done to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lit_compress.numerics.chunked_logits import ChunkedLogits, summed_linear
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # output layer -> whether `_ending` follows it


def run_to_output_layer(net: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Return the output of ``net`` for ``inputs``, with :class:`ChunkedLogits` as its ``logits``.

    The logits are an ordinary tensor if the model has no output layer over a vocabulary, or does more to its logits
    than is known here.
    ``options`` are further arguments of its forward; it may be wrapped or sharded as for an ordinary one.
    """
    layer = net.get_output_embeddings()
    if layer is None or not _known.get(layer, True):
        return net(**inputs, **options)
    read: list[Tensor] = []
    gave: list[Tensor] = []
    first = layer not in _known

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        read.append(args[0])
        return (args[0][..., : int(first), :],)

    def after(_: nn.Module, args: Any, output: Tensor) -> None:
        gave.append(output)

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        output = net(**inputs, **options)
    finally:
        for handle in handles:
            handle.remove()
    ending = _ending(net)
    if first:
        _known[layer] = _same(ending, read, gave, output.logits)
        if not _known[layer]:
            note(
                f"'{net.config.model_type}' changes its logits in an unknown way; they are computed for "
                "whole batches, which takes memory"
            )
            return net(**inputs, **options)
    product = summed_linear(layer)
    output.logits = ChunkedLogits(read[0], lambda states: ending(product(states)), output.logits.shape[-1])
    return output


def _ending(net: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the function that the forward of ``net`` applies to its output layer's output."""
    cap = getattr(net.config, "final_logit_softcapping", None)
    bias = getattr(net, "final_logits_bias", None)

    def ending(logits: Tensor) -> Tensor:
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if bias is not None:
            logits = logits + bias.to(logits.device)
        return logits

    return ending


@torch.no_grad()
def _same(ending: Callable[[Tensor], Tensor], read: list[Tensor], gave: list[Tensor], logits: Tensor) -> bool:
    """Return whether ``ending`` makes the model's own ``logits`` of its output layer's output."""
    if len(read) != 1 or read[0].ndim != 3:
        return False
    expected = ending(gave[0]).to(logits.dtype)
    return expected.shape == logits.shape and torch.allclose(expected, logits, equal_nan=True)
