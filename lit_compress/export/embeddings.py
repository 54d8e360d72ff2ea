"""The table of token embeddings of an export, as two factors or as 8-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.data.tokens import token_counts
from lit_compress.models.embeddings import shrink_table
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def table_bytes(net: PreTrainedModel) -> int:
    """Return the size of the table of token embeddings of ``net``."""
    return sum(p.nbytes for p in net.get_input_embeddings().parameters())


def shrink_embeddings(net: PreTrainedModel, data: DataModule, form: str, rank: int | None) -> dict[str, Any]:
    """Make the table of ``net`` smaller, in place, and return the report's entry on it.

    Factors are weighted by how often the tokens occur in the training data, if there are any.

    Args:
        net: as it is exported.
        data: as the tokenizer of the export reads it.
        form: ``rank=64`` or ``int8``, as the user typed it.
        rank: of the factors; None for int8.

    Returns:
        The ``form``; whether it is ``weighted``; the ``error`` of the table, as a share of its norm; its ``bytes``, and
        ``of`` how many.

    Raises:
        UserError: there is no table that can be made smaller.
    """
    option, counts, whole = f"export: --embeddings {form}", None, table_bytes(net)
    if rank is not None:
        try:
            counts = token_counts(data, net.config.vocab_size)
        except UserError as reason:
            note(f"{option}: all tokens weigh the same, as there is no training data ({reason})")
    error = shrink_table(net, rank, counts, option)
    return {"form": form, "weighted": counts is not None, "error": error, "bytes": table_bytes(net), "of": whole}
