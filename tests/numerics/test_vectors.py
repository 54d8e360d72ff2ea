"""The losses of sentence vectors against loops."""

import math

import pytest
import torch
from moments import draw
from torch.nn.functional import normalize

from lit_compress.numerics.losses import consistency_loss, distillation_loss, task_loss


def _vectors(*shape, seed=0):
    return normalize(draw(*shape, seed=seed), dim=-1)


def test_the_distance_from_a_teacher_is_that_of_loops():
    ours, theirs = _vectors(5, 1, 7), _vectors(5, 1, 7, seed=1)
    pairs = [(i, j) for i in range(5) for j in range(5)]
    expected = sum(1 - float(ours[i, 0] @ theirs[i, 0]) for i in range(5)) / 5
    expected += sum(float(ours[i, 0] @ ours[j, 0] - theirs[i, 0] @ theirs[j, 0]) ** 2 for i, j in pairs) / 25
    assert float(distillation_loss(ours, theirs, "vectors")) == pytest.approx(expected, abs=1e-12)
    assert float(task_loss(ours, theirs.flatten(1), "vectors")) == pytest.approx(expected, abs=1e-12)
    assert float(distillation_loss(theirs, theirs, "vectors")) == pytest.approx(0, abs=1e-12)
    cosines = [1 - float(ours[i, 0] @ theirs[i, 0]) for i in range(5)]
    assert float(consistency_loss(ours, theirs, "vectors")) == pytest.approx(sum(cosines) / 5, abs=1e-12)


def test_scored_pairs_are_ordered():
    vectors, scores = _vectors(4, 2, 6), torch.tensor([1.0, 3.0, 1.0, 2.0])
    cosines = [float(a @ b) for a, b in vectors]
    wrong = [20 * (cosines[j] - cosines[i]) for i in range(4) for j in range(4) if scores[i] > scores[j]]
    expected = math.log(1 + sum(map(math.exp, wrong)))
    assert float(task_loss(vectors, scores, "vectors")) == pytest.approx(expected, rel=1e-9)
    assert float(task_loss(vectors, torch.ones(4), "vectors")) == 0  # nothing to be ordered


@pytest.mark.parametrize("texts", [2, 3])
def test_a_query_finds_its_document(texts):
    """An equal document of another row is none of its wrong ones."""
    vectors = _vectors(4, texts, 6)
    numbers = torch.arange(4 * texts).view(4, texts)
    numbers[2, 1] = numbers[0, 1]
    losses = []
    for i in range(4):
        found = [(i == row and k == 1, 20 * float(vectors[i, 0] @ vectors[row, k]))
                 for row in range(4) for k in range(1, texts)
                 if (row, k) == (i, 1) or numbers[row, k] != numbers[i, 1]]  # fmt: skip
        own = next(value for right, value in found if right)
        losses.append(math.log(sum(math.exp(value) for _, value in found)) - own)
    assert float(task_loss(vectors, numbers, "vectors")) == pytest.approx(sum(losses) / 4, rel=1e-9)
