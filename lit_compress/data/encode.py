"""Tokenisation of a split, once for the same content: the result is kept in the cache folder.

So are the labels of texts that have none, for kind embedding: the vectors that a teacher gives them. They are computed
once for all epochs, stages and processes, and the dev metric is computed as for any labels.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lit_compress.data.batching import PaddedBatches, batch_order
from lit_compress.models.backbones import load_finetuned, load_tokenizer
from lit_compress.models.checks import is_compressed
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type
from lit_compress.tasks.base import Columns
from lit_compress.tasks.records import Task
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.devices import current_device, to_device
from lit_compress.utils.progress import track
from lit_compress.utils.types import Dataset, Tokenizer

FORMAT = 2  # to be raised when the columns written here change, so that old caches are not read
TARGETS = 1  # to be raised when the vectors are computed in another way
ROWS_PER_PROCESS = 20_000  # with fewer rows another process does not pay
# settings that change tokens and are no part of the backend, with their usual values: hashed only if they differ, so
# that a stopped run keeps its key
_OWN = {"truncation_side": "right", "split_special_tokens": False, "tgt_lang": None}


def tokenizer_key(tokenizer: Tokenizer) -> str:
    """Return a hash of everything that determines the token ids of a text, without the tokenizer's path."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # arguments of the last call, no property of the tokenizer
    backend["truncation"] = backend["padding"] = None
    inserted = tokenizer.bos_token, tokenizer.unk_token  # inserted by types of task, not by the backend
    own = [(name, value) for name, usual in _OWN.items() if (value := getattr(tokenizer, name, usual)) != usual]
    return short_hash(type(tokenizer).__name__, json.dumps(backend), tokenizer.model_input_names, inserted, *own)


def content_key(dataset: Dataset) -> str:
    """Return a hash of the columns and all rows of ``dataset``."""
    digest = hashlib.sha256(repr(dataset.features).encode())
    # as Python values: Arrow's buffers may hold more than the rows (slices), or be divided differently
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        digest.update(repr(table.to_pydict()).encode())
    return digest.hexdigest()[:16]


def encoding_key(dataset: Dataset, tokenizer: Tokenizer, task: Task, max_length: int) -> str:
    """Return a hash of everything that determines the result of :func:`encode`."""
    return short_hash(
        FORMAT,
        content_key(dataset),
        tokenizer_key(tokenizer),
        task.kind,
        task.text,
        task.label,
        max_length,
        task.spans.stride,
        task.writing.target_length,
        # also how vectors are made, as this key is all that a run that continues compares
        *([task.pooling.tokens] if task_type(task).pools else []),
        *(["split"] if task.split_words else []),
        *([len(task.labels)] if task_type(task).own_columns else []),
        *filter(None, (task.pooling.prompt, task.pooling.dim)),
    )


def encode(dataset: Dataset, tokenizer: Tokenizer, task: Task, max_length: int, key: str | None = None) -> Dataset:
    """Return checked rows as :meth:`TaskType.encode` makes inputs of them, in their order, read from disk.

    ``key`` is from :func:`encoding_key`, which reads all rows; None: it is computed.

    Raises:
        UserError: the cache folder cannot be written.
    """
    import datasets

    key = key or encoding_key(dataset, tokenizer, task, max_length)

    def fill(folder: Path) -> None:
        own = copy.deepcopy(tokenizer)  # a call changes its settings, also in the file that exports have of it

        def tokenize(batch: Columns, rows: list[int]) -> Columns:
            return task_type(task).encode(batch, rows, own, task, max_length)

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        several = min(cores, len(dataset) // ROWS_PER_PROCESS)
        dataset.map(
            tokenize,
            batched=True,
            with_indices=True,
            remove_columns=dataset.column_names,
            cache_file_name=str(folder / "tokens.arrow"),  # on disk, not in memory, however many rows there are
            load_from_cache_file=False,
            num_proc=several if several > 1 else None,
            new_fingerprint=key,
            desc=f"Tokenising {task.name}",
        )

    files = sorted(build_once(cache_folder() / f"tokens-{key}", fill).glob("*.arrow"))  # of each process
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])


def add_targets(
    rows: Dataset, encoded: Dataset, key: str, teacher: str, task: Task, max_length: int, batch_size: int
) -> tuple[Dataset, str]:
    """Return texts as token ids with the teacher's vectors, of length 1, as ``labels``; and the key of both.

    The teacher, a folder or a name, reads the ``rows`` with its own tokenizer, ``batch_size`` texts per forward.
    ``encoded`` are the same as the model reads them that learns, and ``key`` is of their content.

    Raises:
        UserError: the teacher cannot be loaded.
    """
    from datasets import load_from_disk

    name = Path(teacher).expanduser()
    net = load_net(name) if is_compressed(name) else load_finetuned(teacher, task, "model.teacher")
    tokenizer = load_tokenizer(teacher, task, "model.teacher")
    own = encoding_key(rows, tokenizer, task, max_length)
    read = encode(rows, tokenizer, task, max_length, own)
    key = short_hash(TARGETS, key, own, digest_of(net.state_dict().items()))

    def fill(folder: Path) -> None:
        batches, lengths = PaddedBatches(read, int(tokenizer.pad_token_id)), list(read["length"])
        order = track(batch_order(lengths, batch_size), "the teacher's vectors", -(-len(read) // batch_size))
        vectors = vectors_of(net, (batches[rows] for rows in order), task)
        with_vectors(encoded, vectors, key).save_to_disk(folder)

    return load_from_disk(build_once(cache_folder() / f"targets-{key}", fill)), key


def with_vectors(encoded: Dataset, vectors: torch.Tensor, key: str) -> Dataset:
    """Return texts as token ids with ``vectors`` [rows, width] as ``labels``, in memory; ``key`` identifies both."""
    return encoded.map(
        lambda _, numbers: {"labels": vectors[numbers].tolist()},
        batched=True, with_indices=True, keep_in_memory=True, new_fingerprint=key, desc="Vectors",
    )  # fmt: skip


def digest_of(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return a hash of the names and the values of tensors, in their order."""
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@torch.inference_mode()
def vectors_of(net: Any, batches: Iterable[dict[str, torch.Tensor]], task: Task) -> torch.Tensor:
    """Return the vectors [rows, width] that a model gives single texts, of length 1, in the order of the rows.

    The batches have all texts, each once; the model stays on the device.
    """
    device, kind = current_device(), task_type(task)
    net, vectors, rows = net.to(device).eval(), [], []
    for batch in batches:
        moved = to_device(batch, device)
        vectors.append(kind.logits(kind.run(net, moved), moved)[:, 0].float().cpu())
        rows.append(batch["index"])
    return torch.cat(vectors)[torch.cat(rows).argsort()]
