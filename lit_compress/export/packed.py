"""A model that reads texts without padding: packed.

Packed texts lie end to end in one row, and attention stays within each: PyTorch's ``varlen_attn`` on CUDA, elsewhere
the attention of one text after another. Models whose attention transformers can exchange can be packed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model

RESULT = "last_hidden_state"
_WAY = "packed"


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
