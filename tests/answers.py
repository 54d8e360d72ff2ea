"""The scores of answers as SQuAD's evaluation defines them, word by word."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer):
    """Return an answer in lower case without punctuation, articles and repeated spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer, truths):
    """Return 1.0 if the normalized answer is one of the normalized ``truths`` (empty if there are none), else 0.0."""
    return float(any(normalize(answer) == normalize(truth) for truth in truths or [""]))


def token_f1(answer, truths):
    """Return the largest F1 of the answer's normalized words, over ``truths``; 1.0 if neither has any words."""
    given, best = normalize(answer).split(), 0.0
    for true in (normalize(truth).split() for truth in truths or [""]):
        same = sum((Counter(given) & Counter(true)).values())
        best = max(best, 2 * same / (len(given) + len(true)) if given or true else 1.0)
    return best
