"""Linears whose weights are transposed in files: GPT-2's ``Conv1D`` is a Linear in all models of the package.

``as_linears`` is called where a model is built or loaded. From there on all code sees Linears, and all files, state
dicts included, have the form of the family, so that ordinary programs load them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Net = TypeVar("Net", bound="PreTrainedModel")
Part = TypeVar("Part", bound=nn.Module | nn.Parameter)
_NAMES = "transposed"  # attribute of a module: names of its children whose weights are transposed in files


class TransposedLinear(nn.Linear):
    """A Linear whose weight is [in, out] in a state dict."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (name := f"{prefix}weight") in destination:  # under another name where it has a low-rank update
            destination[name] = destination[name].t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (name := f"{prefix}weight") in state_dict:
            state_dict[name] = state_dict[name].t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)


def as_linears(net: Net) -> Net:
    """Replace every ``Conv1D`` of ``net`` by a Linear with the same values, in place; return ``net``."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(net.modules()):
        transposed = {name: child for name, child in parent.named_children() if isinstance(child, Conv1D)}
        for name, old in transposed.items():
            linear = TransposedLinear(old.nx, old.nf, device="meta")
            linear.weight, linear.bias = nn.Parameter(old.weight.detach().t().contiguous()), old.bias
            setattr(parent, name, linear.train(old.training))
        if transposed:
            setattr(parent, _NAMES, frozenset(transposed))
    return net


def in_form_of_files(parent: nn.Module, child: str, module: Part) -> Part:
    """Return ``module``, which is to be ``child`` of ``parent``; a Linear so that files have it as the family does."""
    if type(module) is nn.Linear and child in getattr(parent, _NAMES, ()):
        module.__class__ = TransposedLinear
    return module
