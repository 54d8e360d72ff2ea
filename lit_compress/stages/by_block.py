"""Measurements of a compression with one block of a model in memory at a time, in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lit_compress.models.block_net import empty
from lit_compress.models.projected.sliced import whole_axes
from lit_compress.models.surgery import replace
from lit_compress.stages.compression import Chosen, Compression
from lit_compress.utils.files import atomic_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MeasuredBlocks(Mapping[str, Tensor]):
    """The tensors by name, each read from its file when it is asked for; every finished block has a folder.

    Args:
        folder: of the folders.
        compression: that measures.
        shapes: the whole dense model, without values.
        blocks: names of the blocks.
        sites: names of the matrices that are measured.
    """

    def __init__(
        self, folder: Path, compression: Compression, shapes: PreTrainedModel, blocks: Sequence[str],
        sites: Sequence[str],
    ) -> None:  # fmt: skip
        self.folder, self.compression, self.shapes, self.blocks = folder, compression, shapes, blocks
        self.sites = [[name for name in sites if name.startswith(f"{block}.")] for block in blocks]
        self._files: dict[int, dict[str, Path]] = {}  # of finished blocks, by name of the tensor

    def done(self, number: int) -> bool:
        """Return whether a block has its folder."""
        return self._path(number).is_dir()

    def write(self, number: int, block: nn.Module, statistics: dict[Any, Any]) -> None:
        """Measure a block and write its folder.

        Args:
            number: of the block.
            block: with its values, which are released if matrices are measured.
            statistics: by site; {} for none. The dict is also dropped.
        """
        from safetensors.torch import save_file

        names = self.sites[number]
        for name in names:
            weight = block.get_parameter(f"{name.removeprefix(f'{self.blocks[number]}.')}.weight")
            replace(self.shapes, f"{name}.weight", nn.Parameter(weight.detach().cpu()))  # type: ignore[arg-type]
        if names:
            empty(block)
        with atomic_folder(self._path(number)) as temporary:
            measured = self.compression.measure(self.shapes, names, statistics)
            for i, (finished, tensors) in enumerate(measured):
                save_file(tensors, temporary / f"{i:05}.safetensors")
                for name in finished:
                    empty(self.shapes.get_submodule(name))
        for name in names:
            empty(self.shapes.get_submodule(name))

    def axes(self, number: int) -> dict[int, Tensor]:
        """Return the axes U [d, d] of a block's sites, where those were measured."""
        return {int(key): whole_axes(self[key]) for key in self._of(number)}

    def chosen(self, number: int, chosen: Chosen) -> Chosen:
        """Return the choices of a block."""
        return {name: value for name, value in chosen.items() if name.startswith(f"{self.blocks[number]}.")}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor from its file."""
        from safetensors import safe_open

        for number in range(len(self.blocks)):
            if (path := self._of(number).get(name)) is not None:
                with safe_open(path, framework="pt") as file:
                    return file.get_tensor(name).clone()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the tensors that are there."""
        return (name for number in range(len(self.blocks)) for name in self._of(number))

    def __len__(self) -> int:
        """Return the number of tensors that are there."""
        return sum(1 for _ in self)

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.compression.name}-{number:05}"

    def _of(self, number: int) -> dict[str, Path]:
        """Return the files of a block's tensors, {} before it is finished; they are looked through once."""
        from safetensors import safe_open

        if number not in self._files and self.done(number):
            self._files[number] = files = dict[str, Path]()
            for path in sorted(self._path(number).iterdir()):
                with safe_open(path, framework="pt") as file:
                    files |= dict.fromkeys(file.keys(), path)
        return self._files.get(number, {})
