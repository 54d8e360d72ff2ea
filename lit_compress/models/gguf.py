"""GGUF files, the models of llama.cpp: one file has the configuration, the tokenizer and the weights.

A file is read once, through transformers, to a folder of safetensors in the cache. From then on the model is that
folder, as a name on the hub is its snapshot. Quantized weights become float32.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch

from lit_compress.models.architectures import ARCHITECTURES
from lit_compress.models.checks import check_described, check_numbers
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
    with file.open("rb") as stream:
        begin = stream.read(4)
    if begin != b"GGUF":
        raise UserError(f"{what}: '{file.name}' is no GGUF file, it begins with {begin!r}; download it again")
    if _SPLIT.search(file.name):
        raise UserError(f"{what}: '{file.name}' is one of several files; join them with llama-gguf-split --merge")
    stat = file.stat()
    key = short_hash(str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    return build_once(cache_folder() / "gguf" / f"{file.stem}-{key}", lambda to: _read(what, file, to))


# bytes of a value by the number of its type; a text (8) and a list (9) have lengths of their own
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MOST_LISTED, MOST_NAMED = (
    2**21,
    2**16,
)  # values of all lists, fields and tensors; known vocabularies have 262,144 pieces


def _check_header(what: str, file: Path) -> None:
    """Refuse a header that counts more than any model has, or more than the file: the library makes objects of it all.

    Raises:
        UserError: it does, or it is broken.
    """
    listed = 0

    def skip(stream: IO[bytes], kind: int, times: int = 1) -> None:
        nonlocal listed
        if kind in _WIDTHS:
            stream.seek(_WIDTHS[kind] * times, 1)
            return
        for _ in range(times):
            if kind == 8:
                stream.seek(_number(stream), 1)
            else:
                inner, count = _number(stream, 4), _number(stream)
                listed += count
                if kind != 9 or inner == 9 or listed > MOST_LISTED:
                    raise ValueError(f"a list of {count:,} values")
                skip(stream, inner, count)

    try:
        with file.open("rb") as stream:
            version, tensors, fields = _number(stream, 8) >> 32, _number(stream), _number(stream)
            if version not in (2, 3) or max(tensors, fields) > MOST_NAMED:
                raise ValueError(f"version {version}, {tensors:,} tensors and {fields:,} fields")
            for _ in range(fields):
                skip(stream, 8)
                skip(stream, _number(stream, 4))
    except (ValueError, OverflowError, OSError) as error:
        raise UserError(f"{what}: '{file.name}' has {error} in its header; it is broken, download it again") from error


def _number(stream: IO[bytes], size: int = 8) -> int:
    """Read a number without sign."""
    if len(content := stream.read(size)) < size:
        raise ValueError("less than it counts")
    return int.from_bytes(content, "little")


def _read(what: str, file: Path, to: Path) -> None:
    """Write the model in a GGUF file as a folder of safetensors, in float32."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    _check_header(what, file)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tensors = GGUFReader(file).tensors
        types = {tensor.tensor_type.name for tensor in tensors}
        config = AutoConfig.from_pretrained(**source)
        if (family := config.model_type) not in ARCHITECTURES:
            raise UserError(f"{what}: architecture '{family}' is not supported; {nearest(family, ARCHITECTURES)}")
        check_numbers(what, "header", config.to_dict())
        stored = sum(int(tensor.n_elements) for tensor in tensors)
        check_described(what, "header", lambda: auto.from_config(config), stored)
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
        raise UserError(f"{what}: cannot read '{file.name}': {reason}") from error
