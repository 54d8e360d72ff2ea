"""The token that pads, for heads that look for the last token of a text by its id.

The classifiers of decoders read the last token that is not ``pad_token_id``. A text that ends with this token is read
one token too early, and one that is padded with another token is read in its padding. The attention mask does not help.
So the tokenizer and the configuration must agree, and an end token that is behind every text must not pad, unless
the configuration says that it always did.

Some families number positions from behind the padding token, and so have fewer of them.
"""

from __future__ import annotations

from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.types import Config, Tokenizer

# Families whose first token has the position pad_token_id + 1. OPT, BART and YOSO have rows of their own in front, and
# rotary and relative positions have no table: of theirs all are left.
BEHIND_PADDING = {
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
_PADS = {"mpnet": 1}  # whatever its pad_token_id


def finds_last(config: Config, task: Task) -> bool:
    """Return whether models of ``config`` for ``task`` read the last real token: a decoder's classifier."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    if task_type(task).auto_class != "AutoModelForSequenceClassification":
        return False
    writes, fills = (type(config) in kind._model_mapping for kind in (AutoModelForCausalLM, AutoModelForMaskedLM))
    return writes and not fills and not config.is_encoder_decoder


def names_padding(config: Config) -> bool:
    """Return whether a configuration names a row of the embeddings as padding; some have None or -1."""
    number = getattr(config, "pad_token_id", None)
    return number is not None and 0 <= number < config.vocab_size


def set_pad_token(what: str, tokenizer: Tokenizer, config: Config, task: Task) -> None:
    """Set the token that pads where a tokenizer has none, or one that a head would misread.

    If a head looks for the last token, the configuration's padding token pads. If it names none, the tokenizer's does,
    then the end token, unless it is behind every text: then another special token does.

    Raises:
        UserError: there is no token that can pad.
    """
    own, end = tokenizer.pad_token, tokenizer.eos_token
    if own is None and end is None:
        raise UserError(f"{what}: its tokenizer has no padding token and no end token; add one")
    if not finds_last(config, task):
        tokenizer.pad_token = own or end
        return
    added = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    special, last = list(dict.fromkeys([*tokenizer.all_special_tokens, *added])), _last(tokenizer)  # texts have none
    named = tokenizer.convert_ids_to_tokens(config.pad_token_id) if names_padding(config) else None
    if named in special:
        tokenizer.pad_token = named
        return
    free = [token for token in (own, end, tokenizer.unk_token, *special) if token not in (None, last)]
    if not free:
        raise UserError(f"{what}: its tokenizer has no padding token, and '{last}' ends every text; add one")
    tokenizer.pad_token = free[0]


def _last(tokenizer: Tokenizer) -> str | None:
    """Return the special token that a tokenizer puts behind every text; None if it puts none there."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    return str(tokenizer.convert_ids_to_tokens(ids[-1])) if ids and special[-1] else None


def usable_positions(config: Config) -> int | None:
    """Return the largest number of tokens of a text that models of ``config`` can read; None if nothing limits it."""
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_encoder_position_embeddings", None)
    if most is None or config.model_type not in BEHIND_PADDING:
        return most
    return most - _PADS.get(config.model_type, config.pad_token_id or 0) - 1
