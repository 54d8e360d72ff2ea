"""The vocabulary of an export, cut to the pieces that the training data and unknown words need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.data.tokens import changed_inputs, token_counts, with_tokenizer
from lit_compress.models.pieces import cut_tokenizer
from lit_compress.models.vocabulary import keep_tokens, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

_OPTION = "export: --vocabulary data"


def tokens_kept(net: PreTrainedModel, data: DataModule) -> int:
    """Return how many tokens ``cut_vocabulary`` keeps; of ``net`` only the configuration is read.

    Raises:
        UserError: the tokenizer cannot be cut.
    """
    return len(cut_tokenizer(data.tokenizer, _used(net, data), _OPTION)[1])


def _used(net: PreTrainedModel, data: DataModule) -> set[int]:
    counts = token_counts(data, net.config.vocab_size, written=net.can_generate())
    return {*counts.nonzero().flatten().tolist(), *special_ids(net)}


def cut_vocabulary(net: PreTrainedModel, data: DataModule) -> tuple[PreTrainedModel, DataModule, dict[str, Any]]:
    """Return ``net`` and ``data`` with a smaller tokenizer, and the report's entry on it.

    Pieces of the training examples stay, as far as the model reads them; all special tokens, characters and bytes; and
    for BPE the pieces of their merges (models/pieces.py).

    Returns:
        The model; the data as the small tokenizer reads it; ``rows`` kept ``of`` so many, the number of training
        ``inputs``, and how many of them have ``changed`` (none, except for words that the big tokenizer did not know).

    Raises:
        UserError: the tokenizer or the model cannot be cut.
    """
    size = net.config.vocab_size
    tokenizer, kept = cut_tokenizer(data.tokenizer, _used(net, data), _OPTION)
    small = keep_tokens(net, kept, _OPTION)
    other = with_tokenizer(data, tokenizer)
    facts = {"rows": len(kept), "of": size, "inputs": data.train_size(), "changed": changed_inputs(data, other, kept)}
    return small, other, facts
