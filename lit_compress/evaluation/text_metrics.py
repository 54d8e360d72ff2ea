"""Metrics of generated text, ROUGE and perplexity: correct over any number of batches and ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lit_compress.evaluation.kept_rows import KeptRows, RowMeans

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True)


class Rouge(RowMeans):
    """ROUGE-1, 2, L and Lsum of the package ``rouge_score``, with stemming: F, mean over the texts, 0 to 1.

    Lsum compares sentences, which are separated by line ends in predictions and references, as in CNN/DailyMail. No
    other sentence splitter is used, so that nothing is downloaded. On one line Lsum equals L.
    """

    scores: list[Tensor]

    def update(self, preds: Sequence[str], target: Sequence[str]) -> None:
        """Add one batch."""
        by_text = [_scorer().score(true, text) for text, true in zip(preds, target, strict=True)]
        rows = [[scores[name].fmeasure for name in ROUGE] for scores in by_text]
        self.keep(torch.tensor(rows, device=self.device).view(-1, len(ROUGE)))

    def values(self) -> dict[str, Tensor]:
        """Return rouge1, rouge2, rougeL and rougeLsum of all texts of all ranks."""
        scores = dim_zero_cat(self.scores).cpu() if len(self.scores) else torch.zeros(0, len(ROUGE))
        return dict(zip(ROUGE, scores.unbind(1), strict=True))


class Perplexity(KeptRows):
    """Exponential of the mean negative log-likelihood of all tokens of all batches and ranks; infinite without any."""

    higher_is_better = False
    sums: list[Tensor]

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Add one batch: losses [b, tokens] in nats, and bool [b, tokens], which of them count."""
        self.keep(torch.stack([torch.where(counted, losses.float(), 0.0).sum(1), counted.sum(1)], dim=1))

    def compute(self) -> Tensor:
        """Return the perplexity of all batches of all ranks."""
        if not len(self.sums):
            return torch.tensor(torch.inf, device=self.device)
        loss, count = dim_zero_cat(self.sums).cpu().double().sum(0)
        return (loss / count).exp().float().to(self.device) if count else torch.tensor(torch.inf, device=self.device)
