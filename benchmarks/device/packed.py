"""A BERT that reads its texts end to end in one row, without padding: attention stays within a text.

PyTorch's ``varlen_attn`` on CUDA; elsewhere each text's own attention, which is slow and exact.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

WAY = "packed"


class Packed(nn.Module):
    """A classifier of packed texts.

    Args:
        net: a BERT for classification; its attention is changed in place.
        longest: tokens of the longest text.
    """

    bounds: ClassVar[tuple[Tensor, int]]  # of the call that computes: where texts begin, and the longest

    def __init__(self, net: Any, longest: int) -> None:
        super().__init__()
        AttentionInterface.register(WAY, attend)
        net.set_attn_implementation(WAY)
        self.net, self.longest = net, longest

    def forward(self, input_ids: Tensor, position_ids: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """Return the ``logits`` (texts, classes).

        Args:
            input_ids: of all texts (1, tokens).
            position_ids: of every token in its text (1, tokens).
            starts: where texts begin, and the end (texts + 1,), int32.
        """
        Packed.bounds = starts, self.longest
        hidden = self.net.bert(input_ids=input_ids, position_ids=position_ids).last_hidden_state[0]
        firsts = hidden[starts[:-1].long()].unsqueeze(1)
        return {"logits": self.net.classifier(self.net.bert.pooler(firsts))}


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Return the attention (1, tokens, heads, width) within the texts; all three are (1, heads, tokens, width)."""
    starts, longest = Packed.bounds
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        parts = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
        found: Any = varlen_attn(parts[0], parts[1], parts[2], starts, starts, longest, longest)
        return found.unsqueeze(0), None
    spans = [slice(begin, end) for begin, end in pairwise(starts.tolist())]
    texts = [
        nn.functional.scaled_dot_product_attention(query[:, :, span], key[:, :, span], value[:, :, span])
        for span in spans
    ]
    return torch.cat(texts, 2).transpose(1, 2), None


def packed(lengths: Any, step: int = 1) -> dict[str, Any]:
    """Return the inputs of :class:`Packed` for texts of these lengths.

    Args:
        lengths: tokens of every text.
        step: the tokens are a multiple of it; a text more fills what is missing (at most ``step`` tokens).
    """
    filled = np.append(lengths, -int(lengths.sum()) % step) if step > 1 else np.asarray(lengths)
    ids = np.random.default_rng(0).integers(5, 1000, (1, int(filled.sum())))
    starts = np.concatenate([[0], np.cumsum(filled)]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in filled])[None].astype(np.int64)
    return {"input_ids": ids, "position_ids": positions, "starts": starts}
