"""Texts of mixed lengths: padded in any order, padded when sorted by length, and packed without padding.

Packed texts lie end to end in one row, and attention stays within each: PyTorch's ``varlen_attn`` on CUDA, elsewhere
the attention of one text after another. Models whose attention transformers can exchange can be packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lit_compress.export.runtimes import Inputs, Runner, placed
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model

BATCH, PACKED = 32, 128  # texts of a padded batch, and of a packed row
STEP, PACKED_STEP = 64, 512  # tokens are a multiple of it where a shape is compiled or captured
_FIXED = ("graphs", "compiled")
Runs = dict[str, tuple[Runner, str]]  # by runtime, with the device of the inputs
RESULT = "last_hidden_state"
_WAY = "packed"


def mixed_calls(
    lengths: Any, inputs: Callable[[int, int], Inputs], runs: Runs, ends: Runs, limit: int, vocabulary: int
) -> dict[str, Callable[[], object]]:
    """Return functions by name; each runs all texts.

    Args:
        lengths: tokens of every text, in any order; a multiple of :data:`BATCH`.
        inputs: returns a padded batch of a number of texts and of tokens.
        runs: runners of padded batches.
        ends: runners of :class:`Packed`.
        limit: tokens of the longest text that the model reads.
        vocabulary: its number of different tokens.
    """
    made = dict[str, Callable[[], object]]()
    for order, some in (("any order", lengths), ("by length", np.sort(lengths))):
        for way, (run, device) in runs.items():
            step = STEP if way in _FIXED else 1
            batches = [placed(_padded(part, inputs, step, limit), device) for part in _parts(some, BATCH)]
            made[f"{order}, {way}"] = partial(_run_all, run, batches)
    for way, (run, device) in ends.items():
        step = min(PACKED_STEP, limit) if way in _FIXED else 1
        rows = [packed(part, step, vocabulary) for part in _parts(lengths, PACKED)]
        tensors = [{name: torch.as_tensor(value, device=device) for name, value in row.items()} for row in rows]
        made[f"packed, {way}"] = partial(_run_all, run, tensors)
    return made


def _run_all(run: Runner, batches: list[Inputs]) -> None:
    for batch in batches:
        run(batch)


def _parts(lengths: Any, count: int) -> Iterator[Any]:
    return (lengths[begin : begin + count] for begin in range(0, len(lengths), count))


def _padded(lengths: Any, inputs: Callable[[int, int], Inputs], step: int, limit: int) -> Inputs:
    """Return a batch that is as long as its longest text, or the next multiple of ``step``."""
    longest = min(-(-int(lengths.max()) // step) * step, limit)
    given, mask = inputs(len(lengths), longest), np.arange(longest) < lengths[:, None]
    return {**given, "attention_mask": torch.as_tensor(mask.astype(np.int64))}


class Packed(nn.Module):
    """The blocks of a model, without its head, which read packed texts.

    Args:
        net: its attention is changed in place.
        longest: tokens of the longest text.

    Raises:
        LookupError: its attention cannot be exchanged, or its states are other than single texts have.
    """

    bounds: ClassVar[tuple[Tensor, int]]  # of the call that computes: where texts begin, and the longest

    def __init__(self, net: Model, longest: int) -> None:
        super().__init__()
        from transformers import AttentionInterface

        AttentionInterface.register(_WAY, _attend)
        self.net, self.longest = net.base_model, longest
        positions = usable_positions(net.config)
        self.first = net.config.max_position_embeddings - positions if positions else 0
        self._adopt(net)

    def _adopt(self, net: Model) -> None:
        """Exchange the attention, and compare the states of three texts before and afterwards."""
        lengths = np.array([5, 300, 8]).clip(max=self.longest)  # longer than most windows of attention
        row = {name: torch.as_tensor(value) for name, value in packed(lengths, 1, net.config.vocab_size).items()}
        texts = row["input_ids"][0].split(lengths.tolist())
        with torch.inference_mode():
            try:
                alone = torch.cat([self.net(input_ids=text[None]).last_hidden_state[0] for text in texts])
                net.set_attn_implementation(_WAY)
                together = self(**row)[RESULT]
            except Exception as error:  # models raise anything
                raise LookupError(f"it reads no packed texts: {' '.join(str(error).split())[:120]}") from error
        off = float((together - alone).abs().max() / alone.abs().max().clamp_min(1))
        if not off <= 1e-4:
            raise LookupError(f"it reads no packed texts: their states differ from single texts' by {off:.1e}")

    def forward(self, input_ids: Tensor, position_ids: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """Return the last states (tokens, width).

        Args:
            input_ids: of all texts (1, tokens).
            position_ids: of every token in its text (1, tokens).
            starts: where texts begin, and the end (texts + 1,), int32.
        """
        Packed.bounds = starts, self.longest
        states = self.net(input_ids=input_ids, position_ids=position_ids + self.first).last_hidden_state
        return {RESULT: states[0]}


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Return the attention (1, tokens, heads, width) within the texts; all three are (1, heads, tokens, width)."""
    starts, longest = Packed.bounds
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        parts = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
        found: Any = varlen_attn(parts[0], parts[1], parts[2], starts, starts, longest, longest)
        return found.unsqueeze(0), None
    spans = [slice(begin, end) for begin, end in pairwise(starts.tolist())]
    attention = nn.functional.scaled_dot_product_attention
    texts = [attention(query[:, :, span], key[:, :, span], value[:, :, span]) for span in spans]
    return torch.cat(texts, 2).transpose(1, 2), None


def packed(lengths: Any, step: int, vocabulary: int) -> dict[str, Any]:
    """Return random inputs of :class:`Packed` for texts of these lengths.

    Args:
        lengths: tokens of every text.
        step: the tokens are a multiple of it; a text more fills what is missing (less than ``step`` tokens).
        vocabulary: number of different tokens.
    """
    filled = np.append(lengths, -int(lengths.sum()) % step) if step > 1 else np.asarray(lengths)
    ids = np.random.default_rng(0).integers(5, vocabulary, (1, int(filled.sum())))
    starts = np.concatenate([[0], np.cumsum(filled)]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in filled])[None].astype(np.int64)
    return {"input_ids": ids, "position_ids": positions, "starts": starts}
