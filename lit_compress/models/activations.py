"""The memory of a forward, found by running the model on tensors that have shapes but no values.

The model's own code runs with the kernels of a CPU, so that whatever an architecture and its attention keep is counted.
It takes about a second, whatever the sizes are.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_compress.models.accounting import random_inputs
from lit_compress.models.sites import base_prefix, find_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive.

    Args:
        known: tensors that do not count.
    """

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages = weakref.WeakKeyDictionary({value.untyped_storage(): 0 for value in known.values()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and (storage := value.untyped_storage()) not in self._storages:
                self._storages[storage] = size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, size)
        return output

    def _free(self, size: int) -> None:
        self.now -= size


Graph = Literal["none", "parameters", "sites"]


def forward_bytes(net: PreTrainedModel, texts: int, length: int, graph: Graph, half: bool = False) -> int | None:
    """Return the most bytes that a forward takes besides the parameters, without the output layer over a vocabulary.

    Args:
        net: in any form, without values (device ``meta``) or with them.
        texts: of the batch.
        length: tokens of every text. An encoder-decoder writes a quarter as many.
        graph: ``parameters``: it is a forward of training, with dropout, that keeps activations for all gradients;
            ``sites``: it keeps activations for gradients by the sites' outputs; ``none``: it keeps nothing.
        half: under autocast to 16 bits.

    Returns:
        Bytes; None if the model's code looks at values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    prefix, was = base_prefix(net), net.training
    ids = random_inputs(net, 1, length)
    del ids["attention_mask"]  # whether it masks anything would be asked
    net.train(graph == "parameters")
    sites = [net.get_submodule(site.name) for site in find_sites(net)] if graph == "sites" else []
    hooks = [site.register_forward_hook(lambda _, args, output: output.requires_grad_()) for site in sites]
    try:
        with FakeTensorMode():
            own = {
                name.removeprefix(prefix): torch.empty(
                    value.shape, dtype=value.dtype, requires_grad=graph == "parameters" and value.requires_grad
                )
                for name, value in [*net.named_parameters(), *net.named_buffers()] if name.startswith(prefix)
            }  # fmt: skip
            inputs = {name: torch.empty(texts, value.shape[1], dtype=value.dtype) for name, value in ids.items()}
            cast = torch.autocast("cpu", torch.bfloat16, enabled=half)
            with _Live(own) as live, torch.set_grad_enabled(graph != "none"), cast:
                output = torch.func.functional_call(net.base_model, own, (), inputs | {"use_cache": False})
                logits = output.get("logits") if net.can_generate() else None
                return live.peak - (0 if logits is None else logits.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    finally:
        net.train(was)
        for hook in hooks:
            hook.remove()
