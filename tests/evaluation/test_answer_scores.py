"""Scores of answers against torchmetrics."""

import random

import pytest
from torchmetrics.functional.text import squad

from lit_compress.evaluation.answer_scores import exact_match, token_f1

WORDS = ["the", "The", "a", "an", "cat", "Cat's", "dog", "dogs,", "dog", "10.5", "U.S.", "naïve", "  ", "-", "theatre"]


def _texts(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))


def test_scores_of_random_texts():
    rng = random.Random(0)
    answers = [_texts(rng) for _ in range(400)]
    truths = [[_texts(rng) for _ in range(rng.randint(1, 3))] for _ in answers]
    for answer, golds in zip(answers, truths, strict=True):
        expected = squad(
            [{"prediction_text": answer, "id": "0"}],
            [{"answers": {"answer_start": [0] * len(golds), "text": golds}, "id": "0"}],
        )
        assert 100 * exact_match(answer, golds) == float(expected["exact_match"])
        assert 100 * token_f1(answer, golds) == pytest.approx(float(expected["f1"]), abs=1e-4)
    found = [sum(map(score, answers, truths)) / 400 for score in (exact_match, token_f1)]
    assert 0 < found[0] < found[1] < 1


def test_no_answer():
    assert exact_match("", []) == token_f1("", []) == 1.0
    assert exact_match("cat", []) == token_f1("cat", []) == 0.0
    assert exact_match("", ["cat"]) == token_f1("", ["cat"]) == 0.0
