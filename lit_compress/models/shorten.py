"""Models of fewer blocks: which families can have them, how many are kept, and removing the others.

The result is an ordinary model: its configuration has the number of blocks, and cut lists of the blocks' kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lit_compress.models.architectures import families_with, get_architecture
from lit_compress.models.sites import SITES, Model, blocks, module_at
from lit_compress.models.surgery import replace
from lit_compress.utils.errors import UserError


def check_blocks(net: Model, alike: bool = True) -> None:
    """Refuse a model whose blocks cannot be removed, or, if they must be ``alike``, not stand in for each other."""
    architecture, name = get_architecture(net), net.config.model_type
    reasons = {
        "one block runs several times": architecture.repeated,
        "blocks hand their positions on": alike and architecture.passes_on,
    }
    if why := next((why for why, holds in reasons.items() if holds), None):
        able = families_with(lambda other: not (other.repeated or (alike and other.passes_on)))
        raise UserError(f"model.backbone: blocks of '{name}' cannot be removed ({why}); those of {able} can")
    if alike and len(types := set(getattr(net.config, "layer_types", None) or ())) > 1:
        raise UserError(
            f"model.backbone: blocks of '{name}' cannot replace each other: they differ ({', '.join(sorted(types))}); "
            "nearest: a model whose blocks attend alike"
        )


def stack_lengths(net: Model) -> dict[str, tuple[str, int]]:
    """Return name of each list of blocks -> its stack, and its number of blocks."""
    return {name.rpartition(".")[0]: (stack, layer + 1) for stack, layer, name, _ in blocks(net)}


def blocks_left(total: int, density: float, within: bool = False) -> int:
    """Return how many of ``total`` equal blocks ``density`` leaves; a UserError if that does not divide them.

    ``within``: take the largest number that is not above ``density``, if none is just that.

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


def shorten(net: Model, kept: Mapping[str, Sequence[int]]) -> None:
    """Keep some blocks of ``net``, in place, and say so in its configuration.

    ``kept`` is name of each list of blocks -> numbers of the kept blocks, rising; with the first if it differs from the
    others (:func:`holds_first`).
    """
    for path, (stack, total) in stack_lengths(net).items():
        blocks_of = module_at(net, path, nn.ModuleList)
        left = nn.ModuleList([blocks_of[number] for number in kept[path]])
        for number, block in enumerate(left):
            for module in block.modules():
                if hasattr(module, "layer_idx"):  # its place in the cache of a decoder
                    vars(module)["layer_idx"] = number
        replace(net, path, left)
        vars(net).pop(SITES, None)
        above = {"", *(path[:i] for i, letter in enumerate(path) if letter == ".")}
        configs = [getattr(module, "config", None) for name, module in net.named_modules() if name in above]
        for config in {id(config): config for config in configs if config is not None}.values():
            fields = (f"{stack}_layers", f"num_{stack}_layers", "num_layers", "num_hidden_layers")
            setattr(config, next(name for name in fields if hasattr(config, name)), len(left))
            for name, value in list(vars(config).items()):
                if "layer" in name and isinstance(value, list) and len(value) == total:
                    setattr(config, name, [value[number] for number in kept[path]])


def holds_first(net: Model) -> bool:
    """Return whether the first block differs: it has the biases of positions (T5), or no norm (ModernBERT)."""
    architecture = get_architecture(net)
    return architecture.passes_on or architecture.bare_start
