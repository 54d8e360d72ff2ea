"""Sites by a pattern over the names of modules, for models whose architecture has no record.

The pattern is in the configuration of the model, so it is wherever the model is: in the folders of a run, in
exports and in the dense model that sizes are compared with. Only methods that fit every Linear work with such sites.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_compress.models.architectures import ARCHITECTURES, PATTERN
from lit_compress.utils.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# keys and values of a decoder's attention over the encoder's states
_OF_ENCODER = re.compile(r"(?:encoder|cross)_?att(?:n|ention)\.(?:.*\.)?([kv])[^.]*$", re.IGNORECASE)
_NUMBER = re.compile(r"\.(\d+)\.")


class Named(NamedTuple):
    """The parts of a Linear's name: the path inside its block, the number of the block, its stack."""

    name: str
    path: str
    layer: int
    stack: str
    cross: bool


def set_pattern(config: PreTrainedConfig, pattern: str | None) -> None:
    """Write ``pattern`` into the configuration of a model; None changes nothing.

    Raises:
        UserError: it is no pattern, or the architecture has a record.
    """
    if pattern is None:
        return
    if config.model_type in ARCHITECTURES:
        raise UserError(f"model.sites: '{pattern}', but {config.model_type} has a record of its sites; leave it out")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"model.sites: '{pattern}' is no regular expression ({error}); e.g. 'encoder.*.(fc1|fc2)'"
        ) from error
    setattr(config, PATTERN, pattern)


def named_linears(net: PreTrainedModel) -> list[Named]:
    """Return the Linears inside blocks whose names end as the pattern says, also where they were replaced.

    Blocks are the numbered modules of the base model: no pooler, no head and no embedding is in one.

    Raises:
        UserError: there are none.
    """
    wanted = re.compile(rf"(?:.*\.)?(?:{getattr(net.config, PATTERN)})")
    names = list(_linears(net))
    linears = [_read(name) for name in names if wanted.fullmatch(name)]
    if not linears:
        raise UserError(
            f"model.sites: no Linear of {net.config.model_type} is called '{getattr(net.config, PATTERN)}'; "
            f"{nearest(getattr(net.config, PATTERN), names, limit=3)}"
        )
    return linears


def _linears(net: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the layers inside the blocks of the base model that map features to features."""
    base: Any = net.base_model
    start = "" if base is net else f"{net.base_model_prefix}."
    inside = ""
    for name, module in net.named_modules():
        if not name.startswith(start) or not _NUMBER.search(name) or (inside and name.startswith(inside)):
            continue
        if isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features"):
            inside = f"{name}."
            yield name


def _read(name: str) -> Named:
    """Read number, stack and path of a Linear from its name."""
    match = _NUMBER.search(name)
    assert match is not None
    stack, path = "decoder" if "decoder" in name[: match.start()] else "encoder", name[match.end() :]
    over = _OF_ENCODER.search(name) if stack == "decoder" else None
    return Named(name, over[1].lower() if over else path, int(match[1]), stack, bool(over))
