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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lit_compress.evaluation.evaluate import score_outputs
from lit_compress.export.quantize import silent
from lit_compress.export.runtimes import mean_vectors
from lit_compress.models.storage import load_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule

NEEDS = ("model2vec", "skeletoken")
PENALTY, STEPS = 1.0, 200


def check_installed(what: str) -> None:
    """Raise a UserError that begins with ``what`` if a package of static vectors is missing."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise UserError(f"{what}: static vectors need {', '.join(missing)}; in the clone: pip install '.[static]'")


def is_static(folder: Path) -> bool:
    """Return whether model2vec saved a folder."""
    config = folder / "config.json"
    return config.is_file() and read_json("bench", config, dict).get("model_type") == "model2vec"


def features(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    """Return the inputs of the logistic regression: [u], or [u, v, |u - v|, u * v] of two texts, [texts, width]."""
    if second is None:
        return first
    return np.concatenate([first, second, np.abs(first - second), first * second], axis=1)


@torch.inference_mode(False)
def logistic_regression(inputs: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return weight [classes, width] and bias [classes] of the logistic regression with the least loss.

    The loss is the cross-entropy, summed over the rows, plus half the squared norm of the weight (scikit-learn's
    default). L-BFGS in float64.

    Args:
        inputs: [rows, width].
        labels: int [rows].
        classes: number of classes.
    """
    inputs, labels = inputs.to(torch.float64, copy=True), labels.clone()  # a caller's may be without gradients
    weight = torch.zeros(classes, inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ weight.T + bias
        value = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") + PENALTY / 2 * weight.square().sum()
        (value / len(inputs)).backward()
        return value.detach() / len(inputs)

    optimizer.step(loss)
    return weight.detach().float(), bias.detach().float()


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

    Raises:
        UserError: a package is missing.
    """
    check_installed("static")
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
        UserError: the package is missing, or the folder cannot be read.
    """
    check_installed("static")
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
    rows, encoded = data.train_rows
    labels = torch.from_numpy(encoded.with_format("numpy")["labels"][:]).long()
    inputs = features(*(static.vectors(rows[column]) for column in track(task.text, "static vectors", len(task.text))))
    weight, bias = logistic_regression(torch.from_numpy(inputs), labels, task.num_labels)
    head = weight.numpy(), bias.numpy()
    return StaticVectors(static.table, static.tokenize, static.bytes + weight.nbytes + bias.nbytes, head)


def score(static: StaticVectors, data: DataModule) -> dict[str, float]:
    """Return the scores of the first dev split, as :func:`~lit_compress.evaluation.evaluate.evaluate` with ``sure``."""
    rows = data.validation_rows[0]
    answers = static.answers([rows[column] for column in data.record.text])
    return score_outputs(torch.from_numpy(answers), data)
