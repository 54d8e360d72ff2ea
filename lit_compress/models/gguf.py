"""GGUF files, the models of llama.cpp: one file has the configuration, the tokenizer and the weights.

A file is read once, through transformers, to a folder of safetensors in the cache. From then on the model is that
folder, as a name on the hub is its snapshot. Quantized weights become float32.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lit_compress.models.architectures import ARCHITECTURES
from lit_compress.models.shards import WHOLE, write_shard
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import note, track

SUFFIX = ".gguf"
FLOATS = ("F32", "F16", "BF16")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf")
_WEIGHTS = ("*.safetensors", "*.bin")


def gguf_file(what: str, path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is, or that a folder has in place of other weights; None: there is none.

    Raises:
        UserError: a folder has several.
    """
    if not path.is_dir():
        return path if path.suffix == SUFFIX and path.is_file() else None
    if any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1 and not _SPLIT.search(files[0].name):
        raise UserError(f"{what} has {len(files)} GGUF files; give one of them, e.g. {files[0]}")
    return files[0] if files else None


def as_folder(what: str, path: Path) -> Path:
    """Return the folder that a GGUF file is read to, or ``path`` if that is something else.

    Args:
        what: option and value, the start of messages.
        path: given as a model.

    Raises:
        UserError: the file is split, broken, or of a family without a record; a package to read it is missing.
    """
    if (file := gguf_file(what, path)) is None:
        return path
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise UserError(f"{what} is a GGUF file, which needs {missing[0]}; in the clone: pip install '.[gguf]'")
    if _SPLIT.search(file.name):
        raise UserError(f"{what}: '{file.name}' is one of several files; join them with llama-gguf-split --merge")
    stat = file.stat()
    key = short_hash(str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    return build_once(cache_folder() / "gguf" / f"{file.stem}-{key}", lambda to: _read(what, file, to))


def _read(what: str, file: Path, to: Path) -> None:
    """Write the model in a GGUF file as a folder of safetensors, in float32."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        types = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
        config = AutoConfig.from_pretrained(**source)
        if (family := config.model_type) not in ARCHITECTURES:
            raise UserError(f"{what}: architecture '{family}' is not supported; {nearest(family, ARCHITECTURES)}")
        kinds = ", ".join(sorted(types - {*FLOATS})) or ", ".join(sorted(types))
        note(f"{what} is a GGUF file of type {kinds}; its weights are made float32")
        for _ in track([0], "read the GGUF file"):
            net, info = auto.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
            if info["missing_keys"]:
                raise UserError(f"{what} has no '{sorted(info['missing_keys'])[0]}'; download it again")
            write_shard(dict(net.named_parameters()), to / WHOLE)  # a tied one once
        config.dtype, config.architectures = torch.float32, [type(net).__name__]
        config.save_pretrained(to)
        net.generation_config.save_pretrained(to)
        AutoTokenizer.from_pretrained(**source).save_pretrained(to)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"{what}: cannot read '{file.name}': {reason}; download it again") from error
