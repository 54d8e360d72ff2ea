"""The vocabulary of an export, cut to the pieces that the training data, texts like them and unknown words need."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lit_compress.data.facts import changed_inputs, pieces_missed, token_counts
from lit_compress.models.pieces import cut_tokenizer
from lit_compress.models.vocabulary import keep_tokens, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

_OPTION = "export: --vocabulary data"
MISSED = 0.1  # share of training texts that are left out in the count, and are spelled otherwise, at most
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")  # places that BERT and others leave free


def tokens_kept(net: PreTrainedModel, data: DataModule) -> int:
    """Return how many tokens ``cut_vocabulary`` keeps; of ``net`` only the configuration is read.

    Raises:
        UserError: the tokenizer cannot be cut.
    """
    return len(cut_tokenizer(data.tokenizer, _used(net, data), _OPTION)[1])


def _used(net: PreTrainedModel, data: DataModule) -> set[int]:
    """Return the tokens of the training texts, and the first ones of the vocabulary, as many as other texts need.

    A tokenizer has frequent pieces first. Of a tenth of the training texts at most :data:`MISSED` have a piece that is
    not among the first ones, nor in the other texts.
    """
    size, written = net.config.vocab_size, net.can_generate()
    used = {*token_counts(data.train_tokens(), size, written).nonzero().flatten().tolist(), *special_ids(net)}
    missed = pieces_missed(data.train_tokens(), size, written).sort(descending=True).values.tolist()
    first = [*missed, -1][int(MISSED * len(missed))]
    names = data.tokenizer.convert_ids_to_tokens(list(range(first + 1)))
    return used | {number for number, name in enumerate(names) if name and not _UNUSED.fullmatch(name)}


def cut_vocabulary(net: PreTrainedModel, data: DataModule) -> tuple[PreTrainedModel, DataModule, dict[str, Any]]:
    """Return ``net`` and ``data`` with a smaller tokenizer, and the report's entry on it.

    Pieces of the training examples and the most frequent others stay, as far as the model reads them; all special
    tokens, characters and bytes; and for BPE the pieces of their merges (models/pieces.py).

    Returns:
        The model; the data as the small tokenizer reads it; ``rows`` kept ``of`` so many; the number of training
        ``inputs``, and how many of them have ``changed`` (none, except for words that the big tokenizer did not know);
        the same for ``dev_inputs`` and ``dev_changed``.

    Raises:
        UserError: the tokenizer or the model cannot be cut.
    """
    size = net.config.vocab_size
    tokenizer, kept = cut_tokenizer(data.tokenizer, _used(net, data), _OPTION)
    small = keep_tokens(net, kept, _OPTION)
    other = data.read_by(tokenizer)
    facts: dict[str, Any] = {"rows": len(kept), "of": size}
    before, after = ((d.train_tokens(), d.val_dataloader()[0].dataset.encoded) for d in (data, other))
    for prefix, first, second in zip(("", "dev_"), before, after, strict=True):
        facts |= {f"{prefix}inputs": len(first), f"{prefix}changed": changed_inputs(first, second, kept)}
    return small, other, facts
