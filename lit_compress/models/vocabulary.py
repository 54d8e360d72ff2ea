"""Smaller tables of token embeddings: fewer rows, for fewer tokens, or rows of 8-bit integers.

With fewer tokens, an output layer over the vocabulary loses the same rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.layers import Int8Embedding, SizedEmbedding
from lit_compress.models.accounting import random_inputs
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import size_at
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import replace, with_same_parameters
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5
_BIAS = "final_logits_bias"  # BART's, a buffer next to the output layer


def special_ids(net: PreTrainedModel) -> set[int]:
    """Return the ids of tokens that the configurations of ``net`` name."""
    named = [value for config in _configurations(net) for value in _named(config).values()]
    ids = {number for value in named for number in (value if isinstance(value, list) else [value])}
    return {number for number in ids if 0 <= number < net.config.vocab_size}


@torch.no_grad()
def keep_tokens(net: PreTrainedModel, kept: Sequence[int], option: str = "--vocabulary") -> PreTrainedModel:
    """Return a copy of ``net`` that has only the tokens ``kept``; token ``kept[i]`` is its token ``i``.

    ``kept`` has :func:`special_ids`. Messages begin with ``option``.

    Raises:
        UserError: the copy does not compute the same logits (some architectures number positions by a token's id).
    """
    small, rows = with_same_parameters(net), torch.tensor(kept)
    cut_rows(small, kept)
    new = {old: number for number, old in enumerate(kept)}
    for config in _configurations(small):
        for name, value in _named(config).items():  # ids that never were rows (-1: none) stay
            ids = [new.get(n, n) for n in value] if isinstance(value, list) else new.get(value, value)
            setattr(config, name, ids)
    with tempfile.TemporaryDirectory() as work:  # modules have ids of their own, which they read from the configuration
        save_net(small, Path(work))
        small = load_net(Path(work))
    if not (difference := _difference(net, small, rows)) <= TOLERANCE:
        raise UserError(
            f"{option}: with fewer tokens the logits of {type(net).__name__} differ by {difference:.1e}; nothing was "
            "exported; leave the option out"
        )
    return small


@torch.no_grad()
def cut_rows(small: PreTrainedModel, kept: Sequence[int]) -> None:
    """Cut the table of ``small``, and its output layer over the vocabulary, to the rows ``kept``, in place.

    A model without values has the right shapes afterwards, whatever rows these are.
    """
    rows, new = torch.tensor(kept), {old: number for number, old in enumerate(kept)}
    tables = [small.get_input_embeddings(), *filter(None, [small.get_output_embeddings()])]
    values = {
        value: nn.Parameter(value[rows].contiguous())
        for table in tables
        for name, value in table.named_parameters(recurse=False)
        if name in ("weight", "left", "bias") and len(value) == small.config.vocab_size
    }
    for module in small.modules():  # some tensors have several owners
        for name, value in list(module.named_parameters(recurse=False)):
            if value in values:
                setattr(module, name, values[value])
                padding = new.get(getattr(module, "padding_idx", -1))
                sizes = {"num_embeddings": len(kept), "out_features": len(kept), "padding_idx": padding}
                vars(module).update({size: number for size, number in sizes.items() if hasattr(module, size)})
    if isinstance(bias := getattr(small, _BIAS, None), Tensor):
        setattr(small, _BIAS, bias[:, rows].contiguous())
    small.config.vocab_size = len(kept)


def _configurations(net: PreTrainedModel) -> list[Any]:
    return [net.config, *([net.generation_config] if net.can_generate() and net.generation_config else [])]


def _named(config: Any) -> dict[str, int | list[int]]:
    """Return the settings that are ids of tokens, e.g. ``pad_token_id``; a list may be one of several ends."""
    fields = {n: v for n, v in config.to_dict().items() if n.endswith("token_id")}
    return {n: v for n, v in fields.items() if isinstance(v, int) or (isinstance(v, list) and v)}


def _difference(net: PreTrainedModel, small: PreTrainedModel, rows: Tensor) -> float:
    """Return the largest difference of the logits, relative above 1, on a random batch of kept tokens."""
    length = min(23, usable_positions(net.config) or 23)
    inputs = random_inputs(small, 3, length, seed=2, padded=True)
    before = {name: rows[value] if name.endswith("input_ids") else value for name, value in inputs.items()}
    names = task_type_of_net(small.config).results
    with torch.inference_mode():
        expected, cut = ([output[name] for name in names] for output in (net.eval()(**before), small.eval()(**inputs)))
    pairs = [(e if e.shape == f.shape else e[..., rows], f) for e, f in zip(expected, cut, strict=True)]
    return max(float((f - e).abs().max() / e.abs().max().clamp_min(1)) for e, f in pairs)


def token_table(net: PreTrainedModel) -> str | None:
    """Return the name of the table of token embeddings; None if it is no plain one or its tensor has other uses."""
    table = net.get_input_embeddings()
    uses = [name for name, p in net.named_parameters(remove_duplicate=False) if p is getattr(table, "weight", None)]
    if type(table) not in (nn.Embedding, SizedEmbedding) or len(uses) != 1:
        return None
    return uses[0].removesuffix(".weight")


def table_bytes(net: PreTrainedModel) -> int:
    """Return the size of the table of token embeddings of ``net``."""
    return sum(p.nbytes for p in net.get_input_embeddings().parameters())


def check_table(net: PreTrainedModel) -> str:
    """Return the name of the table of token embeddings, which can be made smaller.

    Raises:
        UserError: its tensor has other uses, or it is compressed already.
    """
    if (name := token_table(net)) is None:
        raise UserError(
            f"export: --embeddings int8: the table of token embeddings of '{net.config.model_type}' has other uses (an "
            "output layer, a second stack), or its own forward; leave it out"
        )
    return name


def shrink_shapes(net: PreTrainedModel) -> None:
    """Apply the shapes of :func:`shrink_table` to a ``net`` without values, in place."""
    name = check_table(net)
    with torch.device("meta"):
        replace(net, name, Int8Embedding(*reversed(size_at(net, name))))


@torch.no_grad()
def shrink_table(net: PreTrainedModel) -> float:
    """Replace the table of token embeddings by rows of 8-bit integers, in place; return its error / its norm.

    Raises:
        UserError: as :func:`check_table`.
    """
    name = check_table(net)
    before = net.get_parameter(f"{name}.weight").detach()
    replace(net, name, Int8Embedding.from_table(before))
    after = net.get_submodule(name)(torch.arange(len(before)))
    return float((after - before).norm() / before.norm())
