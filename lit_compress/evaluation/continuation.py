"""One prompt, continued by several models: a look at whether a compressed model still writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lit_compress.data.datamodule import DataModule

PROMPT, NEW = 16, 20  # tokens
# of a model's own settings of generation; beams, penalties and sampling are left out
_KEPT = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id", "no_repeat_ngram_size")


def continuations(
    dense: tuple[PreTrainedModel, DataModule], compressed: tuple[PreTrainedModel, DataModule]
) -> dict[str, Any] | None:
    """Return how two models continue with the first tokens of the dev set, always with the likeliest token.

    A model with an encoder reads them, and writes a text of its own.

    Args:
        dense: the model before, and the data as its tokenizer reads it.
        compressed: the model afterwards, and the data as its own tokenizer reads it.

    Returns:
        The text of the ``prompt``; ``dense`` and ``compressed``, their texts; ``tokens``, the number that the dense
        model writes, and how many of these, from the first, are the ``same``. None for models that do not write.
    """
    if not all(net.can_generate() for net, _ in (dense, compressed)):
        return None
    encoded = dense[1].val_dataloader()[0].dataset.encoded
    if not len(encoded):
        return None
    tokenizers: list[Any] = [data.tokenizer for _, data in (dense, compressed)]
    prompt = tokenizers[0].decode(encoded[0]["input_ids"][:PROMPT], skip_special_tokens=True)
    ids = [_written(net, data.tokenizer, prompt) for net, data in (dense, compressed)]
    if tokenizers[0] is not tokenizers[1]:
        pieces: list[list[Any]] = [tok.convert_ids_to_tokens(row) for tok, row in zip(tokenizers, ids, strict=True)]
    else:
        pieces = ids
    first, second = (tok.decode(row, skip_special_tokens=True) for tok, row in zip(tokenizers, ids, strict=True))
    return {
        "prompt": prompt, "dense": first, "compressed": second, "tokens": len(ids[0]), "same": _same(*pieces),
    }  # fmt: skip


def _same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return with how many equal items two lists begin.

    >>> _same([4, 5, 6], [4, 5, 7, 6])
    2
    """
    differ = (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


@torch.inference_mode()
def _written(net: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the new tokens that ``net`` writes."""
    if net.config.is_encoder_decoder:
        ids, positions = tokenizer(prompt)["input_ids"], None
    else:  # as the blocks of a text are read
        start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        ids = start + tokenizer(prompt, add_special_tokens=False)["input_ids"]
        positions = getattr(net.config, "max_position_embeddings", None)
    new = NEW if positions is None else max(1, min(NEW, positions - len(ids)))
    inputs = torch.tensor([ids], device=net.device)
    settings = _likeliest(net, new)
    written = net.eval().generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    tokens = written[0].tolist()
    return tokens[1:] if net.config.is_encoder_decoder else tokens[len(ids) :]


def _likeliest(net: PreTrainedModel, new: int) -> GenerationConfig:
    """Return settings with which ``net`` writes the likeliest token at every step, without messages of the library."""
    from transformers import GenerationConfig

    own = net.generation_config
    settings = {name: value for name in _KEPT if (value := getattr(own, name, None)) is not None}
    end = settings.get("eos_token_id")
    pad = getattr(own, "pad_token_id", None)
    pad = pad if pad is not None else end[0] if isinstance(end, list) else end
    return GenerationConfig(**settings, pad_token_id=pad, do_sample=False, num_beams=1, max_new_tokens=new)
