"""Apply the choices for an export to a model without values, to know the file's size before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_compress.export.choices import Choices
from lit_compress.export.fuse import compact, fuse
from lit_compress.models.vocabulary import cut_rows, shrink_shapes
from lit_compress.utils.devices import move

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def outline_export(
    net: PreTrainedModel, choices: Choices, tokens_left: int | None = None, merge: bool = False
) -> PreTrainedModel:
    """Return a copy of ``net`` in the shapes and dtypes of the file that ``write_export`` writes.

    Padding of widths (``round_to``) and programs are left out.

    Args:
        net: as a method leaves it, without values.
        choices: the user's.
        tokens_left: rows that ``vocabulary data`` keeps; None: all.
        merge: matrices are stored dense that are faster so.

    Raises:
        UserError: ``net`` cannot have these choices.
    """
    small = compact(net)
    if merge:
        small = fuse(small)
    if tokens_left is not None:
        cut_rows(small, range(tokens_left))
    if choices.embeddings:
        shrink_shapes(small)
    return move(small, getattr(torch, choices.dtype)) if choices.half else small
