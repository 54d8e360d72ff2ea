"""Text to token ids, once per content: the result is kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.cache import build_once, cache_folder, short_hash
from lit_compress.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # raise it when the columns written here change, so that old caches are not read


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides what ``tokenizer`` makes of a text; not of where it lies."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # what the last call asked for, which is no property of the tokenizer
    backend["truncation"] = backend["padding"] = None
    return short_hash(type(tokenizer).__name__, json.dumps(backend), tokenizer.model_input_names)


def content_key(dataset: Dataset) -> str:
    """Return a hash of the columns and all rows of ``dataset``."""
    digest = hashlib.sha256(repr(dataset.features).encode())
    # as Python values: Arrow's buffers may hold more than the rows (slices), or be cut differently
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        digest.update(repr(table.to_pydict()).encode())
    return digest.hexdigest()[:16]


def encoding_key(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, task: Task, max_length: int) -> str:
    """Return a hash of all that decides the result of :func:`encode`."""
    return short_hash(FORMAT, content_key(dataset), tokenizer_key(tokenizer), task.text, max_length)


def encode(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, task: Task, max_length: int) -> Dataset:
    """Tokenise the text columns of ``dataset``; pairs become one sequence, truncated at the longer text.

    Args:
        dataset: the columns ``task.text`` and, unless it is for prediction, ``label``.
        tokenizer: a fast tokenizer.
        task: names the columns.
        max_length: tokens kept of an example, special tokens included.

    Returns:
        The rows in the same order, read from disk: ``input_ids`` (list of int), ``token_type_ids`` if the
        tokenizer makes them, ``labels`` if the dataset has ``label``, ``length`` (tokens, int).

    Raises:
        UserError: the cache folder cannot be written.
    """
    from datasets import load_from_disk

    key = encoding_key(dataset, tokenizer, task, max_length)

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = [batch[column] for column in task.text]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length)
        columns = {name: tokens[name] for name in ("input_ids", "token_type_ids") if name in tokens}
        columns["length"] = [len(ids) for ids in tokens["input_ids"]]
        if "label" in batch:
            columns["labels"] = batch["label"]
        return columns

    def fill(folder: Path) -> None:
        encoded = dataset.map(
            tokenize,
            batched=True,
            remove_columns=dataset.column_names,
            keep_in_memory=True,  # the one copy on disk is ours, written below
            load_from_cache_file=False,
            new_fingerprint=key,
            desc=f"Tokenising {task.name}",
        )
        encoded.save_to_disk(folder)

    return load_from_disk(build_once(cache_folder() / f"encoded-{key}", fill))
