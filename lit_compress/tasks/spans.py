"""Answers that are spans of a text: the best ones from logits, and their metrics as in SQuAD's evaluation.

Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250 (v1.1), Rajpurkar et al. 2018, https://arxiv.org/abs/1806.03822
(v2.0: some questions have no answer; the logits at the first token are the score of that).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def best_spans(logits: Tensor, allowed: Tensor, number: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the spans of highest score, start logit + end logit, best first.

    Every span of at most ``longest`` tokens is a candidate, not only those between the best starts and best ends.

    Args:
        logits: [b, 2, tokens], start and end logits.
        allowed: bool [b, tokens], tokens at which answers may begin and end.
        number: largest number of spans.
        longest: largest number of tokens of an answer.

    Returns:
        First tokens, last tokens (int) and scores (-inf: there is no such span), [b, number] each.
    """
    first, last = logits.masked_fill(~allowed[:, None], -torch.inf).unbind(1)
    lasts = F.pad(last, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # [b, first, length - 1]
    scores = (first[..., None] + lasts).flatten(1)
    score, place = scores.topk(min(number, scores.shape[1]))
    begin = place // longest
    return begin, (begin + place % longest).clamp_max(allowed.shape[1] - 1), score


def normalize(answer: str) -> str:
    """Return an answer in lower case without punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """Return 1.0 if the normalized answer is one of the normalized ``truths`` (empty if there are none), else 0.0."""
    given = normalize(answer)
    return float(any(given == normalize(truth) for truth in truths or ("",)))


def token_f1(answer: str, truths: Sequence[str]) -> float:
    """Return the largest F1 of the answer's normalized words, over ``truths``; 1.0 if neither has any words."""
    given = normalize(answer).split()
    return max(_word_f1(given, normalize(truth).split()) for truth in truths or ("",))


def _word_f1(given: list[str], true: list[str]) -> float:
    if not given or not true:
        return float(given == true)
    same = sum((Counter(given) & Counter(true)).values())
    return 2 * same / (len(given) + len(true))


def best_threshold(scores: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the highest mean metric over all thresholds below which an answer is given, and that threshold.

    Args:
        scores: per question: score of "no answer" minus the best span's; the metric of that span; the metric of giving
            no answer.
    """
    ordered = sorted(scores)
    after = [margin for margin, *_ in ordered[1:]] + [None]
    total = best = sum(none for *_, none in ordered)
    threshold = 0.0
    for (margin, answered, none), following in zip(ordered, after, strict=True):
        total += answered - none
        if total > best and margin != following:  # a threshold gives all answers of one margin, or none
            best, threshold = total, margin
    return best / max(1, len(ordered)), threshold
