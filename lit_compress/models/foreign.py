"""Models in forms that cannot be compressed: adapters, quantized weights, and pointers in place of files.

Libraries load some of them without a word and leave out unknown tensors, or ask for a package that does not help. Here
each of them is one line with advice, which begins with ``what``: option and value. Only names, sizes, first bytes and
``config.json`` are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lit_compress.models.own_code import read_settings
from lit_compress.models.shards import files_of_index, header_of
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import POINTER, is_pointer
from lit_compress.utils.manifest import check_manifest

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MERGE = "merge it first (merge_and_unload(), then save_pretrained) and give that folder"
FLOAT = "give the model in float, from which it was made"
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)")
_GGUF = "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME) reads it, and save_pretrained writes the folder"
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # keys of config.json that say so
_READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def check_form(what: str, path: Path) -> None:
    """Refuse a model, in a folder or the value given in its place, whose form no library can read.

    Raises:
        UserError: it is a file; or the folder differs from its manifest, or has an adapter, quantized weights, only
            weights of another program, a pointer or another text in place of a file, or an index of files elsewhere.
    """
    if path.is_file():
        near = f"; {_GGUF}" if path.suffix == ".gguf" else ", written by save_pretrained"
        raise UserError(f"{what} is a file; give the folder of a model{near}")
    names = {file.name for file in path.iterdir() if file.is_file()} if path.is_dir() else set()
    check_manifest(what, path)
    if adapter := next((name for name in ADAPTERS if name in names), None):
        raise UserError(f"{what} has a PEFT adapter ({adapter}), which is no whole model; {MERGE}")
    config = read_settings(path / "config.json")
    if settings := next(filter(None, map(config.get, _QUANTIZED)), None):
        raise UserError(f"{what} is quantized ({quantization_method(settings)}); {FLOAT}")
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    if not weights and (gguf := sorted(name for name in names if name.endswith(".gguf"))):
        raise UserError(f"{what} has only the weights of another program, '{gguf[0]}', which cannot be read; {_GGUF}")
    for index in names & {f"{name}.index.json" for name in ("model.safetensors", "pytorch_model.bin")}:
        files_of_index(what, path / index)
    safe = [name for name in weights if name.endswith(".safetensors")]
    for name in (*sorted(names & _READ), *(safe or weights)):
        if is_pointer(path / name):
            raise UserError(f"{what}: its '{name}' is {POINTER}")
        try:
            tensors = header_of(path / name) if name in safe else {}
        except SafetensorError as why:
            raise UserError(f"{what}: its '{name}' is no whole safetensors file ({why}); download it again") from why
        for tensor, (kind, _) in tensors.items():
            if tensor.endswith("weight") and kind[0] in "IU" and "structure.json" not in names:  # of no export
                raise UserError(f"{what} is quantized ('{tensor}' is of type {kind}); {FLOAT}")


def quantization_method(settings: Any) -> str:
    """Return the name of the method that quantized the weights.

    >>> quantization_method({"quant_method": "gptq", "bits": 4}), quantization_method({"bits": 4})
    ('gptq', 'by its config.json')
    """
    fields: dict[str, Any] = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    method = fields.get("quant_method")
    return str(getattr(method, "value", method) or "by its config.json")


def check_weights(what: str, folder: Path) -> None:
    """Refuse a model whose weights are missing before anything is made of it.

    Raises:
        UserError: they are.
    """
    check_form(what, folder)
    names = {file.name for file in folder.iterdir()}
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    if not weights:
        raise UserError(f"{what} has no weights (model.safetensors); give the folder of a whole model")
    suffix = ".safetensors" if any(name.endswith(".safetensors") for name in weights) else ".bin"
    for index in folder.glob(f"*{suffix}.index.json"):
        if lost := next((name for name in files_of_index(what, index) if name not in names), None):
            raise UserError(f"{what}: '{lost}' is missing, which '{index.name}' names; download it again")
