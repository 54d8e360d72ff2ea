"""The labels of texts that have none, for kind embedding: the vectors that a teacher gives them, kept in the cache.

So they are computed once for all epochs, stages and processes, and the dev metric is computed as for any labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.data.batching import PaddedBatches, batch_order
from lit_compress.data.encode import encode, encoding_key
from lit_compress.models.backbones import load_finetuned, load_tokenizer
from lit_compress.models.checks import is_compressed
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.tasks.sentences import Pooling, read_dense, read_pooling
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.devices import current_device, to_device
from lit_compress.utils.progress import note, track

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

FORMAT = 1  # to be raised when the vectors are computed in another way, so that old caches are not read


def pooling_of(backbone: str, teacher: str | None = None) -> Pooling:
    """Return the pooling of a run: its teacher's, the model that is compressed.

    Args:
        backbone: folder of the backbone, or its name.
        teacher: folder of the model whose vectors are learned; None, or a folder that does not say how: the backbone.

    Raises:
        UserError: the folder makes vectors in a way that no export can keep.
    """
    own = read_pooling(Path(backbone).expanduser(), "model.backbone")
    if teacher is None or teacher == backbone:
        return own or Pooling()
    theirs = read_pooling(Path(teacher).expanduser(), "model.teacher")
    if own and theirs and replace(own, dense=()) != replace(theirs, dense=()):
        note(f"vectors are made as model.teacher '{teacher}' makes them, not as model.backbone '{backbone}' does")
    return theirs or own or Pooling()


def add_targets(
    rows: Dataset, encoded: Dataset, key: str, teacher: str, task: Task, max_length: int, batch_size: int
) -> tuple[Dataset, str]:
    """Return texts as token ids with the teacher's vectors, of length 1, as ``labels``; and the key of both.

    Args:
        rows: the texts, which the teacher reads with its own tokenizer.
        encoded, key: the same as token ids of the model that learns, and the key of their content.
        teacher: folder or hub name of the model.
        task, max_length, batch_size: of kind embedding; tokens of the longest input, and texts per forward.

    Raises:
        UserError: the teacher cannot be loaded.
    """
    from datasets import load_from_disk

    name = Path(teacher).expanduser()
    net = load_net(name) if is_compressed(name) else load_finetuned(teacher, task, "model.teacher")
    tokenizer = load_tokenizer(teacher, task, "model.teacher")
    read = encode(rows, tokenizer, task, max_length)
    key = short_hash(FORMAT, key, encoding_key(rows, tokenizer, task, max_length), _digest(net), *_dense(task))

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


def _dense(task: Task) -> list[str]:
    """Return a hash of every Dense module after the model."""
    layers = map(read_dense, map(Path, task.pooling.dense))
    return [short_hash(dense.weight.tolist(), None if dense.bias is None else dense.bias.tolist()) for dense in layers]


def _digest(net: PreTrainedModel) -> str:
    """Return a hash of all values of a model."""
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy())
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
