"""The losses of sentence vectors against loops."""

from __future__ import annotations

import math

import pytest
import torch

from lit_compress.numerics.vectors import SHARPNESS, contrastive_loss


def test_contrastive_loss_is_the_loop() -> None:
    """Every document of the batch is a wrong one of a query, unless it is the same text as the right one."""
    vectors = torch.nn.functional.normalize(torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    texts = torch.tensor([[0, 1, 2], [3, 4, 1], [5, 6, 7]])
    losses = []
    for row in range(3):
        scores = {}
        for other in range(3):
            for place in (1, 2):
                if (other, place) == (row, 1) or texts[other, place] != texts[row, 1]:
                    scores[other, place] = math.exp(SHARPNESS * float(vectors[row, 0] @ vectors[other, place]))
        losses.append(-math.log(scores[row, 1] / sum(scores.values())))
    assert len(scores) == 6 and float(contrastive_loss(vectors, texts)) == pytest.approx(sum(losses) / 3, rel=1e-5)
