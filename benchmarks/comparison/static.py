"""Static vectors in place of a model: one vector for each token of a vocabulary, as model2vec makes and stores them.

The vector of a text is the mean of its tokens' vectors, normalized (model2vec, Tulkens and van Dongen, 2024,
https://github.com/MinishLab/model2vec). Two texts are similar as their vectors' cosine says. Classes get a logistic
regression on the vector of the text, and of two texts u and v on [u, v, |u - v|, u * v] (InferSent, Conneau et al.,
2017, section 3.2).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_compress.evaluation.intervals import intervals
from lit_compress.evaluation.metrics import bind, build_metrics
from lit_compress.export.integers import silent
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule


def features(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    """Return the inputs of the logistic regression: [u], or [u, v, |u - v|, u * v] of two texts, [texts, width]."""
    if second is None:
        return first
    return np.concatenate([first, second, np.abs(first - second), first * second], axis=1)


def logistic_regression(inputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weight [classes, width] and bias [classes], float32, of scikit-learn's logistic regression.

    Args:
        inputs: [rows, width].
        labels: int [rows].
    """
    from sklearn.linear_model import LogisticRegression

    made = LogisticRegression(tol=1e-6, max_iter=1000).fit(inputs.astype(np.float64), labels)
    weight, bias = made.coef_, made.intercept_
    if len(weight) == 1:  # of two classes it has the difference
        weight, bias = np.concatenate([-weight / 2, weight / 2]), np.concatenate([-bias / 2, bias / 2])
    return weight.astype(np.float32), bias.astype(np.float32)


def mean_vectors(table: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the normalized mean vector of every text, float [texts, width]; 0 for a text without tokens.

    Args:
        table: float [tokens, width].
        ids: int [texts, length].
        mask: [texts, length], 1 at tokens that count, else 0.
    """
    sums = (mask[:, None].astype(table.dtype) @ table[ids])[:, 0]  # the mean has the same direction
    return sums / ((sums * sums).sum(axis=1, keepdims=True) ** 0.5).clip(1e-30)


@dataclass
class StaticVectors:
    """A table of vectors, and a head that answers a task.

    Attributes:
        table: float32 [tokens, width].
        tokenize: function of texts that returns the tokens of each that count.
        bytes: of the table's file, and of the logistic regression.
        head: weight and bias of the logistic regression; None for the cosine of two texts.
    """

    table: np.ndarray
    tokenize: Any
    bytes: int
    head: tuple[np.ndarray, np.ndarray] | None = None

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vector of every text, float32 [texts, width]."""
        tokens = self.tokenize([str(text) for text in texts])
        length = max(1, *map(len, tokens))
        mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in tokens])
        ids = np.array([[*row] + [0] * (length - len(row)) for row in tokens])
        return mean_vectors(self.table, ids, mask)

    def answers(self, columns: Sequence[Sequence[str]], step: int = 512) -> np.ndarray:
        """Return the logits [texts, classes], or the cosines [texts, 1], of one or two columns of texts."""
        parts = []
        for begin in range(0, len(columns[0]), step):
            parts.append(self._answer([self.vectors(column[begin : begin + step]) for column in columns]))
        return np.concatenate(parts)

    def run(self, ids: np.ndarray, texts: int) -> np.ndarray:
        """Return the answers for tokens [batch, length], which are ``texts`` texts of equal length in a row.

        Without the tokenizer, as programs are timed.
        """
        parts = np.split(ids, texts, axis=1)
        return self._answer([mean_vectors(self.table, part, np.ones_like(part)) for part in parts])

    def _answer(self, vectors: list[np.ndarray]) -> np.ndarray:
        if self.head is None:
            return (vectors[0] * vectors[1]).sum(axis=1, keepdims=True)
        weight, bias = self.head
        return features(*vectors) @ weight.T + bias


def distil(source: Path, folder: Path) -> None:
    """Write static vectors of a model as model2vec makes them: its outputs for every token of the vocabulary, alone.

    Args:
        source: folder of the model and its tokenizer.
        folder: to write.
    """
    from model2vec.distill import distill_from_model
    from transformers import AutoModel, AutoTokenizer

    stored, plain = (source / "structure.json").is_file(), {"dtype": torch.float32, "trust_remote_code": False}
    body: Any = load_net(source).base_model if stored else AutoModel.from_pretrained(source, **plain)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    body.name_or_path = str(source)  # without it the package asks the hub
    with silent():
        made = distill_from_model(body, tokenizer, device="cpu")
    made.save_pretrained(folder)


def read(folder: Path) -> StaticVectors:
    """Return the vectors that model2vec saved in ``folder``.

    Raises:
        UserError: the folder cannot be read.
    """
    from model2vec import StaticModel

    try:
        stored: Any = StaticModel.from_pretrained(folder)
    except Exception as error:  # the package raises anything
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"static: '{folder}' holds no static vectors of model2vec: {reason}") from error
    table = np.asarray(stored.embedding, np.float32)
    if stored.token_mapping is not None:  # several tokens share a vector
        table = table[stored.token_mapping]
    if stored.weights is not None:
        table = table * np.asarray(stored.weights, np.float32)[:, None]
    size = sum(os.path.getsize(file) for file in Path(folder).glob("*.safetensors"))
    return StaticVectors(table, stored.tokenize, size)


def fit_head(static: StaticVectors, data: DataModule) -> StaticVectors:
    """Return the vectors with a head: a logistic regression on the training rows, or the cosine.

    Raises:
        UserError: the task is neither classification nor the similarity of two texts.
    """
    task = data.record
    if task.kind == "regression" and len(task.text) == 2:
        return static
    if task.kind != "classification":
        raise UserError(
            f"static: task '{task.name}' is {task.kind}; static vectors answer classification, and regression of two "
            "texts"
        )
    data.setup("fit")
    split = data._split("train")
    rows, labels = split.rows, split.encoded.with_format("numpy")["labels"][:]
    inputs = features(*(static.vectors(rows[column]) for column in track(task.text, "static vectors", len(task.text))))
    weight, bias = logistic_regression(inputs, labels)
    return StaticVectors(static.table, static.tokenize, static.bytes + weight.nbytes + bias.nbytes, (weight, bias))


def score(static: StaticVectors, data: DataModule) -> dict[str, float]:
    """Return the scores of the first dev split, as :func:`~lit_compress.evaluation.evaluate.evaluate` with ``sure``."""
    kind, metrics, rows = task_type(data.record), build_metrics(data.record), data.val_dataloader()[0].dataset.rows
    answers = torch.from_numpy(static.answers([rows[column] for column in data.record.text])).float()
    bind(metrics, rows)
    for batch in data.val_dataloader()[0]:
        kind.observe(metrics, answers[batch["index"]], batch)
    scores = {name: float(value) for name, value in metrics.compute().items()}
    ends = intervals(metrics, scores, len(rows))
    scores |= {f"{name}_{end}": pair[at] for name, pair in ends.items() for at, end in enumerate(("low95", "high95"))}
    return {f"val/{name}": value for name, value in {**scores, "rows": len(rows)}.items()}
