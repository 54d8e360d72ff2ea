"""BERT-of-Theseus's training block: a coin chooses the block itself or the blocks that it is to replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ReplacedBlock(nn.Module):
    """A block of a host model that gives way to its predecessors in some forwards; in evaluation mode it never does.

    Attributes:
        predecessors: frozen blocks, one after the other, whose place the block takes.
        replaces: the coin of this forward, True for the block itself.
    """

    predecessors: nn.ModuleList
    replaces: bool

    @classmethod
    def adopt(cls, block: nn.Module, predecessors: Sequence[nn.Module]) -> None:
        """Change the class of ``block``, a module of the host model, in place; its attributes stay."""
        block.__class__ = type(f"Replaced{type(block).__name__}", (cls, type(block)), {})
        block.predecessors = nn.ModuleList(predecessors).requires_grad_(False)
        block.replaces = True  # type: ignore[assignment]

    def release(self) -> None:
        """Give the block its own class back, without predecessors."""
        del self.predecessors, self.replaces
        self.__class__ = type(self).__mro__[2]

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the block, without its predecessors' parameters."""
        return [p for name, p in self.named_parameters() if not name.startswith("predecessors.")]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Map hidden states as a block of the host model does."""
        if self.replaces or not self.training:
            return super().forward(hidden_states, *args, **kwargs)
        from transformers import Cache

        # a cache has no place for so many blocks, and training reads none
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        for block in self.predecessors:
            output = block(hidden_states, *args, **kwargs)
            hidden_states = output[0] if isinstance(output, tuple) else output
        # The block's parameters must get a gradient (zero) in every step: DDP waits for it, and AdamW would otherwise
        # skip them on one device but not on two.
        zero = 0.0 * torch.stack([p.reshape(-1)[0] for p in self.own_parameters()]).sum()
        hidden_states = hidden_states + zero.to(hidden_states.dtype)
        return (hidden_states, *output[1:]) if isinstance(output, tuple) else hidden_states
