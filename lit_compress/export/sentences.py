"""The files by which sentence-transformers knows how an export makes vectors: modules, pooling, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lit_compress.utils.files import write_json

if TYPE_CHECKING:
    from lit_compress.tasks.records import Pooling

_MODES = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
_ALL = (*_MODES.values(), "pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens")


def write_sentence_files(folder: Path, width: int, max_length: int, pooling: Pooling) -> None:
    """Write ``modules.json`` and what it names, so that ``SentenceTransformer(folder)`` gives the same vectors.

    Args:
        folder: of the export.
        width: of the vectors.
        max_length: longest text in tokens; longer ones are cut.
        pooling: how vectors are made.
    """
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = modules if pooling.normalize else modules[:2]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", entries)
    (folder / "1_Pooling").mkdir()
    modes = {name: name == _MODES[pooling.tokens] for name in _ALL}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    settings = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)
