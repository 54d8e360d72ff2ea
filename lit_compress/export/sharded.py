"""Export of a model with one block at a time in memory: one file per block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_compress.export.choices import Choices
from lit_compress.export.fuse import in_dtype
from lit_compress.export.modelling import hand_over, ordinary_form, write_as
from lit_compress.models.block_net import BlockNet, empty
from lit_compress.models.shards import write_index, write_shard
from lit_compress.models.storage import save_form
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Change = Callable[["PreTrainedModel", int, bool], None]


def check_choices_by_block(choices: Choices) -> None:
    """Refuse choices that an export by blocks cannot have.

    Raises:
        UserError: names the first.
    """
    usual = Choices()
    for name in ("format", "vocabulary", "embeddings"):
        if getattr(choices, name) != getattr(usual, name):
            raise UserError(
                f"--by_block: --{name} {getattr(choices, name)} needs the whole model; leave it out, or pass it to "
                "'export' where the model fits"
            )


def write_shards(
    net: BlockNet, form: PreTrainedModel, change: Change, dtype: str, out: Path,
    refine: Callable[[int, nn.Module], None] | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Write the compressed model, one file per block and one for the rest, with configuration and code.

    A block whose file is there already is not written again, so a killed process continues with the next one.

    Args:
        net: gives the values of the dense model.
        form: the dense model without values; its blocks are changed.
        change: function of a model like ``form``, the number of a block, and whether it has values, that compresses
            this block in place.
        dtype: of the files.
        out: folder of the export.
        refine: trains a changed block, of a number, before it is written.

    Returns:
        The model of the export, without values.
    """
    out.mkdir(exist_ok=True)
    rest, *paths = (out / f"model-{i + 1:05}-of-{len(net) + 1:05}.safetensors" for i in range(len(net) + 1))
    kind, small = getattr(torch, dtype), copy.deepcopy(form)
    for i in range(len(net)):
        change(small, i, False)
    ordinary = ordinary_form(small)
    for i, name in track(list(enumerate(net.names)), "write", len(net)):
        if paths[i].is_file():
            continue
        block = form.get_submodule(name)
        net.fill(i, block)
        with torch.no_grad():
            change(form, i, True)
        if refine is not None:
            refine(i, block)
        if ordinary is not None:
            block, changed = ordinary.get_submodule(name), block
            hand_over(changed, block)
            empty(changed)
        _write(((f"{name}.{key}", value) for key, value in block.state_dict().items()), kind, paths[i])
        empty(block)
    with net.only_block():
        _write(((key, net.read(key)) for key in net.outside()), kind, rest)
    write_index([rest, *paths])
    made = small if ordinary is None else ordinary
    if dtype != "float32":
        made.config.dtype = kind
    write_as(small, ordinary, out, save_form)
    return made


def _write(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, path: Path) -> None:
    """Write a file in ``dtype``, which must hold all values."""
    partial = path.with_suffix(".partial")
    write_shard({name: in_dtype(name, value, dtype) for name, value in tensors}, partial)
    partial.rename(path)
