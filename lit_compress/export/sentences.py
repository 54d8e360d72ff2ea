"""The files by which sentence-transformers knows how an export makes vectors: modules, pooling, lengths, prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lit_compress.numerics.vectors import POOLINGS
from lit_compress.tasks import task_type
from lit_compress.tasks.sentences import LEGACY_KEYS, SETTINGS, read_dense
from lit_compress.utils.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.sentences import Pooling


def write_sentences(folder: Path, config: PreTrainedConfig, data: DataModule) -> None:
    """Write the files of a model that gives vectors into its folder; nothing for other types of task."""
    if task_type(data.record).pools:
        write_sentence_files(folder, config.hidden_size, data.deployed_length, data.record.pooling)


def write_sentence_files(folder: Path, width: int, max_length: int, pooling: Pooling) -> None:
    """Write ``modules.json`` and the folders it names, so that ``SentenceTransformer(folder)`` gives the same vectors.

    The model's states have ``width`` numbers; texts longer than ``max_length`` tokens are cut.
    """
    names = ["Transformer", "Pooling", *["Dense"] * len(pooling.dense), *["Normalize"] * pooling.normalize]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names) if i)]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    write_json(folder / "modules.json", entries)
    (folder / paths[1]).mkdir(exist_ok=True)
    modes = pooling.tokens.split("+")
    kept = [name for name in POOLINGS if name in modes]  # the order in which keys of older versions join vectors
    said = {key: name in modes for key, name in zip(LEGACY_KEYS, POOLINGS, strict=True)}
    file = {"word_embedding_dimension": width, **(said if kept == modes else {"pooling_mode": modes})}
    write_json(folder / paths[1] / "config.json", file)
    for source, path in zip(map(Path, pooling.dense), paths[2:], strict=False):
        _write_dense(source, folder / path)
    lengths = {"max_seq_length": max_length, **dict(pooling.lengths)}
    write_json(folder / "sentence_bert_config.json", {**lengths, "do_lower_case": pooling.lower})
    write_json(folder / SETTINGS, {
        "prompts": dict(pooling.prompts), "default_prompt_name": pooling.default_prompt,
        "similarity_fn_name": pooling.similarity, **({} if pooling.dim is None else {"truncate_dim": pooling.dim}),
    })  # fmt: skip


def _write_dense(source: Path, folder: Path) -> None:
    """Write a Dense module again."""
    from safetensors.torch import save_file

    dense = read_dense(source)
    out, width = dense.weight.shape
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", {
        "in_features": width, "out_features": out, "bias": dense.bias is not None,
        "activation_function": dense.activation,
    })  # fmt: skip
    tensors = {"linear.weight": dense.weight} | ({} if dense.bias is None else {"linear.bias": dense.bias})
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
