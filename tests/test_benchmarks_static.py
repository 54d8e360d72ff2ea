"""Static vectors: means and logistic regression against naive loops, a real table by model2vec, both kinds of tasks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison.static import (
    StaticVectors,
    distil,
    features,
    fit_head,
    logistic_regression,
    mean_vectors,
    read,
    score,
)
from lit_compress.data.datamodule import DataModule


def test_the_vector_of_a_text_is_the_normalized_mean_of_its_tokens():
    draw = np.random.default_rng(0)
    table, ids = draw.normal(size=(50, 6)).astype(np.float32), draw.integers(0, 50, (5, 7))
    mask = (draw.random((5, 7)) > 0.4).astype(int)
    mask[2] = 0
    for i, vector in enumerate(mean_vectors(table, ids, mask)):
        tokens = [table[ids[i, j]] for j in range(7) if mask[i, j]]
        mean = sum(tokens) / len(tokens) if tokens else np.zeros(6)
        length = np.sqrt((mean**2).sum())
        np.testing.assert_allclose(vector, mean / length if tokens else mean, atol=1e-6)


def test_the_features_of_two_texts():
    u, v = np.array([[1.0, -2.0]]), np.array([[3.0, 0.5]])
    assert features(u).tolist() == [[1.0, -2.0]]
    assert features(u, v).tolist() == [[1.0, -2.0, 3.0, 0.5, 2.0, 2.5, 3.0, -1.0]]


@pytest.mark.parametrize("classes", [2, 3])
def test_the_logistic_regression_has_a_row_for_every_class(classes):
    draw = np.random.default_rng(classes)
    inputs = draw.normal(size=(300, 4))
    labels = (inputs @ draw.normal(size=(4, classes))).argmax(1)
    weight, bias = logistic_regression(inputs, labels)
    assert weight.shape == (classes, 4) and bias.shape == (classes,)
    assert ((inputs @ weight.T + bias).argmax(1) == labels).mean() > 0.95


def test_a_timed_answer_is_that_of_texts():
    """Tokens in, one text or two after each other."""
    draw = np.random.default_rng(1)
    table = draw.normal(size=(9, 4)).astype(np.float32)
    static = StaticVectors(table, lambda texts: [[int(c) for c in text] for text in texts], 0)
    one, two = ["012", "345"], ["888", "761"]
    ids = np.array([[0, 1, 2, 8, 8, 8], [3, 4, 5, 7, 6, 1]])
    cosines = [[float(static.vectors([a])[0] @ static.vectors([b])[0])] for a, b in zip(one, two, strict=True)]
    np.testing.assert_allclose(static.answers([one, two]), cosines, atol=1e-6)
    np.testing.assert_allclose(static.run(ids, 2), cosines, atol=1e-6)
    static.head = draw.normal(size=(3, 4)).astype(np.float32), np.zeros(3, np.float32)
    np.testing.assert_allclose(static.run(ids[:, :3], 1), static.answers([one], step=1), atol=1e-6)
    assert static.vectors([""]).tolist() == [[0.0] * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_backbone):
    """A table that model2vec made of the tiny model and saved."""
    pytest.importorskip("model2vec"), pytest.importorskip("skeletoken")
    out = tmp_path_factory.mktemp("static") / "vectors"
    distil(tiny_backbone, out)
    return out


def test_vectors_are_those_of_model2vec(folder):
    from model2vec import StaticModel

    texts = ["a great film", "great film film, film", "zzq"]
    theirs = StaticModel.from_pretrained(folder).encode(texts)
    static = read(folder)
    np.testing.assert_allclose(static.vectors(texts), theirs, atol=1e-3)  # theirs are added in 16 bits
    assert static.bytes == (folder / "model.safetensors").stat().st_size


def test_classes_are_learned_on_training_rows_and_scored_on_dev_rows(folder, tiny_backbone, tiny_data):
    data = DataModule(task="sst2", backbone=str(tiny_backbone), path=str(tiny_data), batch_size=8)
    static = fit_head(read(folder), data)
    scores = score(static, data)
    answers = static.answers([data.validation_rows[0]["sentence"]]).argmax(1)
    labels = [batch["labels"] for batch in data.val_dataloader()[0]], [b["index"] for b in data.val_dataloader()[0]]
    right = [int(answers[i]) == int(label) for label, i in zip(*map(torch.cat, labels), strict=True)]
    assert scores["val/accuracy"] == pytest.approx(sum(right) / len(right)) and scores["val/accuracy"] > 0.6
    assert scores["val/accuracy_low95"] < scores["val/accuracy"] and scores["val/rows"] == len(right)
    assert static.bytes > read(folder).bytes
