"""Tensors in several safetensors files: reading them one by one, and writing them as they are made.

The files are named as in transformers: ``model.safetensors``, or ``model-00001-of-00017.safetensors`` and so on with
``model.safetensors.index.json``, which names the file of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from lit_compress.utils.errors import UserError
from lit_compress.utils.files import json_of, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


def header_of(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype, shape)} of the tensors of a safetensors file, whose values are not read."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def files_of_index(what: str, index: Path) -> list[str]:
    """Return the names of the files that an index names, which lie next to it.

    Raises:
        UserError: it is broken, or names a file elsewhere.
    """
    try:
        names = list(dict.fromkeys(json_of(index)["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{what}: its '{index.name}' is no list of files; download it again") from error
    if elsewhere:
        raise UserError(f"{what}: its '{index.name}' names '{elsewhere[0]}', which is no file next to it; it is broken")
    return names


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in ``folder``: one, or those that its index names.

    Raises:
        UserError: the index is broken.
    """
    if (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        return [folder / WHOLE]
    return [folder / name for name in files_of_index(f"model: '{folder}'", folder / INDEX)]


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


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some files by name, each read when it is asked for, as a view of its file, and not kept."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._places = {name: path for path in files for name in header_of(path)}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        from safetensors import safe_open

        with safe_open(self._places[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._places)


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

    def rename(self, net: PreTrainedModel) -> None:
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
