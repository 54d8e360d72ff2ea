"""The files of a model: forms that cannot be compressed, and tensors in several safetensors files.

Libraries load adapters, quantized weights and pointers in place of files without a word and leave out unknown tensors,
or ask for a package that does not help. Here each of them is one line with advice, which begins with ``what``: option
and value. Only names, sizes, first bytes and ``config.json`` are read.

The files are named as in transformers: ``model.safetensors``, or ``model-00001-of-00017.safetensors`` and so on with
``model.safetensors.index.json``, which names the file of every tensor.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_compress.models.own_code import read_settings
from lit_compress.models.sites import Model
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import POINTER, is_pointer, json_of, read_json, write_json
from lit_compress.utils.manifest import check_manifest

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MERGE = "merge it first (merge_and_unload(), then save_pretrained) and give that folder"
FLOAT = "give the model in float, from which it was made"
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)")
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # keys of config.json that say so
_READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def header_of(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype, shape)} of the tensors of a safetensors file, whose values are not read."""
    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def files_of_index(what: str, index: Path) -> list[str]:
    """Return the names of the files that an index names; a UserError if it is broken, or one is elsewhere."""
    try:
        names = list(dict.fromkeys(json_of(index)["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{what}: its '{index.name}' is no list of files; download it again") from error
    if elsewhere:
        raise UserError(f"{what}: its '{index.name}' names '{elsewhere[0]}', which is no file next to it; it is broken")
    return names


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in ``folder``: one, or those that its index names."""
    if (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        return [folder / WHOLE]
    return [folder / name for name in files_of_index(f"model: '{folder}'", folder / INDEX)]


def stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of every safetensors file in ``folder``: others, once its model was written again."""
    files = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]


def check_form(what: str, path: Path, whole: bool = False) -> None:
    """Refuse a model, in a folder or the value given in its place, whose form no library can read.

    Raises:
        UserError: it is a file; or the folder differs from its manifest, or has an adapter, quantized weights,
            a pointer or another text in place of a file, broken settings of generation, or an index of files elsewhere;
            or, if it is to be ``whole``, weights are missing.
    """
    if path.is_file():
        raise UserError(f"{what} is a file; give the folder of a model, written by save_pretrained")
    names = {file.name for file in path.iterdir() if file.is_file()} if path.is_dir() else set()
    check_manifest(what, path)
    if adapter := next((name for name in ADAPTERS if name in names), None):
        raise UserError(f"{what} has a PEFT adapter ({adapter}), which is no whole model; {MERGE}")
    config = read_settings(path / "config.json")
    if settings := next(filter(None, map(config.get, _QUANTIZED)), None):
        raise UserError(f"{what} is quantized ({quantization_method(settings)}); {FLOAT}")
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    if whole and not weights:
        raise UserError(f"{what} has no weights (model.safetensors); give the folder of a whole model")
    safe = [name for name in weights if name.endswith(".safetensors")]
    for index in names & {INDEX, "pytorch_model.bin.index.json"}:
        lost = next((name for name in files_of_index(what, path / index) if name not in names), None)
        if whole and lost and (index == INDEX or not safe):
            raise UserError(f"{what}: '{lost}' is missing, which '{index}' names; download it again")
    for name in (*sorted(names & _READ), *(safe or weights)):
        if is_pointer(path / name):
            raise UserError(f"{what}: its '{name}' is {POINTER}")
        if name == "generation_config.json":  # the library leaves a broken one out without a word
            read_json(what, path / name, dict)
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


def net_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of all tensors of the model in ``folder``, whose values are not read."""
    return {name: shape for path in tensor_files(folder) for name, (_, shape) in header_of(path).items()}


def net_bytes(folder: Path) -> int:
    """Return the size of the files with the tensors of the model in ``folder``, safetensors or pickles."""
    files = tensor_files(folder)
    return sum(path.stat().st_size for path in (files if files[0].is_file() else folder.glob("pytorch_model*.bin")))


def stored_dtype(folder: Path) -> str:
    """Return the dtype of the weights of the model in ``folder``: ``float32``, ``float16`` or ``bfloat16``.

    A pickle is not read: its dtype is the one that ``config.json`` has. Several dtypes, and any other, are float32.
    """
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if not (files := tensor_files(folder))[0].is_file():
        config = read_json("model", folder / "config.json", dict)
        name = str(config.get("dtype") or config.get("torch_dtype"))
        return name if name in kinds.values() else "float32"
    dtypes = {dtype for path in files for dtype, _ in header_of(path).values()} & {*kinds, "F64", "F8_E4M3", "F8_E5M2"}
    return kinds.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the model in ``folder``."""
    from safetensors.torch import load_file

    return {name: value for path in tensor_files(folder) for name, value in load_file(path).items()}


class StoredTensors(UserDict[str, Any]):
    """The tensors of some files by name, each read when it is asked for, as a view of its file, and not kept."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self.data = {name: path for path in files for name in header_of(path)}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        with safe_open(self.data[name], framework="pt") as file:
            return file.get_tensor(name)


class LazyTensors(StoredTensors):
    """The stored tensors of the model in a folder, also by other names of the library; messages begin with ``what``.

    Raises:
        UserError: the folder has no safetensors.
    """

    def __init__(self, folder: Path, what: str) -> None:
        files = tensor_files(folder)
        if lost := next((path for path in files if not path.is_file()), None):
            raise UserError(f"{what} has no '{lost.name}'; by blocks only a folder of safetensors can be read")
        super().__init__(files)
        self.what, self._known = what, {name: name for name in self}

    def rename(self, net: Model) -> None:
        """Also know the tensors by the names that they have in ``net`` where the library calls them otherwise."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [rule for rule in get_model_conversion_mapping(net) if isinstance(rule, WeightRenaming)]
        for name in self:
            new = name
            for renaming in renamings:
                new = renaming.rename_source_key(new)[0]
            self._known.setdefault(new, name)

    def find(self, name: str, prefix: str) -> str | None:
        """Return the name of the tensor ``name`` in the files; some leave out the ``prefix`` of the base model."""
        return next((self._known[n] for n in (name, name.removeprefix(prefix)) if n in self._known), None)


def write_shard(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one file of tensors."""
    from safetensors.torch import save_file

    whole = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def write_index(files: Sequence[Path]) -> None:
    """Write next to ``files`` which tensor is in which."""
    places = {tensor: path.name for path in files for tensor in header_of(path)}
    size = 0  # of the tensors, without the headers
    for path in files:
        with path.open("rb") as file:
            size += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    write_json(files[0].parent / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})
