"""Scores of answers against torchmetrics and a plain evaluation in the words of the official one."""

import random
import re
import string

import pytest
from torchmetrics.functional.text import squad

from lit_compress.evaluation.answer_scores import best_threshold, exact_match, normalize, token_f1


def official_normalize(s):
    """Lower text and remove punctuation, articles and extra whitespace, step by step."""
    s = "".join(ch for ch in s.lower() if ch not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())


def official_f1(gold, found):
    gold, found = official_normalize(gold).split(), official_normalize(found).split()
    if not gold or not found:
        return float(gold == found)
    rest, same = list(gold), 0
    for word in found:
        if word in rest:
            rest.remove(word)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(gold)
    return 2 * precision * recall / (precision + recall)


WORDS = ["the", "The", "a", "an", "cat", "Cat's", "dog", "dogs,", "dog", "10.5", "U.S.", "naïve", "  ", "-", "theatre"]


def _texts(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))


def test_scores_of_random_texts():
    rng = random.Random(0)
    answers = [_texts(rng) for _ in range(400)]
    truths = [[_texts(rng) for _ in range(rng.randint(1, 3))] for _ in answers]
    for answer, golds in zip(answers, truths, strict=True):
        assert normalize(answer) == official_normalize(answer)
        assert exact_match(answer, golds) == max(official_normalize(answer) == official_normalize(g) for g in golds)
        assert token_f1(answer, golds) == pytest.approx(max(official_f1(g, answer) for g in golds))
    expected = squad(
        [{"prediction_text": answer, "id": str(i)} for i, answer in enumerate(answers)],
        [{"answers": {"answer_start": [0] * len(g), "text": g}, "id": str(i)} for i, g in enumerate(truths)],
    )
    found = [100 * sum(map(score, answers, truths)) / 400 for score in (exact_match, token_f1)]
    assert found == pytest.approx([float(expected["exact_match"]), float(expected["f1"])], abs=1e-3)
    assert 0 < found[0] < found[1] < 100


def test_no_answer():
    assert exact_match("", []) == token_f1("", []) == 1.0
    assert exact_match("cat", []) == token_f1("cat", []) == 0.0
    assert exact_match("", ["cat"]) == token_f1("", ["cat"]) == 0.0


def test_best_threshold_is_that_of_a_loop():
    rng = random.Random(1)
    scores = [(rng.choice([-2.0, -1.0, 0.5, 1.5, 3.0]) + rng.random(), rng.random(), 0.0) for _ in range(30)]
    scores += [(rng.gauss(1, 2), 0.0, 1.0) for _ in range(20)]
    means = {t: sum(a if m <= t else n for m, a, n in scores) / 50 for t, *_ in scores}
    best, threshold = best_threshold(scores)
    assert best == pytest.approx(max(means.values())) and best == pytest.approx(means[threshold])
    assert best_threshold([(1.0, 0.0, 1.0)]) == (1.0, 0.0)


def test_answers_of_one_margin_are_given_together():
    scores = [(0.5, 1.0, 0.0), (0.5, 0.0, 1.0), (0.5, 0.0, 1.0), (2.0, 1.0, 0.0)]
    means = {t: sum(a if m <= t else n for m, a, n in scores) / 4 for t in (-1.0, 0.5, 2.0)}
    assert best_threshold(scores) == (max(means.values()), 0.0) == (0.5, 0.0)
    assert best_threshold(scores * 3) == best_threshold(scores)
