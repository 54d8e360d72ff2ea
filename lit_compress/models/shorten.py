"""Nets of fewer blocks: which families can have them, how many stay, and taking the others out.

What is left is an ordinary net: its configuration has the number of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lit_compress.models.architectures import families_with, get_architecture
from lit_compress.models.sites import blocks, module_at
from lit_compress.models.surgery import replace
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_blocks(net: PreTrainedModel) -> None:
    """Refuse a net whose blocks cannot stand in for each other.

    Raises:
        UserError: says why, and which families can.
    """
    architecture, name = get_architecture(net), net.config.model_type
    able = families_with(lambda other: not (other.repeated or other.passes_on))
    if architecture.repeated or architecture.passes_on:
        why = "one block runs several times" if architecture.repeated else "blocks hand their positions on"
        raise UserError(f"model.backbone: blocks of '{name}' cannot be taken out ({why}); those of {able} can")
    if len(types := set(getattr(net.config, "layer_types", None) or ())) > 1:
        raise UserError(
            f"model.backbone: blocks of '{name}' cannot replace each other: they differ ({', '.join(sorted(types))}); "
            "nearest: a net whose blocks attend alike"
        )


def stack_lengths(net: PreTrainedModel) -> dict[str, tuple[str, int]]:
    """Return name of each list of blocks -> its stack, and its number of blocks."""
    lengths: dict[str, tuple[str, int]] = {}
    for stack, layer, name, _ in blocks(net):
        lengths[name.rpartition(".")[0]] = (stack, layer + 1)
    return lengths


def blocks_left(total: int, density: float, within: bool = False) -> int:
    """Return how many of ``total`` equal blocks ``density`` leaves, a number that divides them.

    Args:
        total: number of blocks.
        density: fraction of the blocks.
        within: take the largest number that is not above ``density``, where none is just that.

    Raises:
        UserError: there is no such number.

    >>> blocks_left(12, 0.333)
    4
    """
    valid = [number for number in range(1, total + 1) if total % number == 0]
    best = min(valid, key=lambda number: abs(number / total - density))
    if abs(best / total - density) < 5e-4:
        return best
    below = [number for number in valid if number <= density * total]
    if within and below:
        return below[-1]
    shown = ", ".join(f"{number / total:.4g} ({number})" for number in valid)
    raise UserError(
        f"model.density: {density:g} leaves no number of blocks that divides {total}; nearest valid value "
        f"{best / total:.4g}; all: {shown}"
    )


def shorten(net: PreTrainedModel, left: dict[str, int]) -> None:
    """Keep the first blocks of ``net``, in place, and say so in its configuration.

    Args:
        net: a net that :func:`check_blocks` accepts, with values or without.
        left: name of each list of blocks -> number of blocks.
    """
    configs: dict[int, Any] = {id(config): config for m in net.modules() if (config := getattr(m, "config", None))}
    for path, (stack, _) in stack_lengths(net).items():
        replace(net, path, module_at(net, path, nn.ModuleList)[: left[path]])
        for config in configs.values():
            setattr(config, f"{stack}_layers" if config.is_encoder_decoder else "num_hidden_layers", left[path])
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: left[path]]
