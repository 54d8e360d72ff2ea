"""Metrics of generated text, ROUGE and perplexity: correct over any number of batches and ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_compress.evaluation.kept_rows import KeptRows, RowScores

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True)


class Rouge(RowScores):
    """ROUGE-1, 2, L and Lsum of the package ``rouge_score``, with stemming: F, mean over the texts, 0 to 1.

    Lsum compares sentences, which are separated by line ends in predictions and references, as in CNN/DailyMail. No
    other sentence splitter is used, so that nothing is downloaded. On one line Lsum equals L.
    """

    names = ROUGE
    texts: list[Tensor]

    def update(self, preds: Sequence[str], target: Sequence[str]) -> None:
        """Add one batch."""
        by_text = [_scorer().score(true, text) for text, true in zip(preds, target, strict=True)]
        rows = [[scores[name].fmeasure for name in ROUGE] for scores in by_text]
        self.keep(torch.tensor(rows, device=self.device).view(-1, len(ROUGE)))


class Perplexity(KeptRows):
    """Exponential of the mean negative log-likelihood of all tokens of all batches and ranks; infinite without any."""

    higher_is_better = False
    sums: list[Tensor]

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Add one batch: losses [b, tokens] in nats, and bool [b, tokens], which of them count."""
        self.keep(torch.stack([torch.where(counted, losses.float(), 0.0).sum(1), counted.sum(1)], dim=1))

    def compute(self) -> Tensor:
        """Return the perplexity of all batches of all ranks."""
        loss, count = self.kept()[0].double().sum(0) if len(self.sums) else torch.zeros(2)
        return (loss / count).exp().float().to(self.device) if count else torch.tensor(torch.inf, device=self.device)
