"""The base class of types of task: everything that differs between types, from the rows of a file to the metrics.

Data (``label_of``, ``encode``), methods (``logits``, ``counted``, ``observe``) and evaluation (``outputs``, ``pieces``,
``answer``) use the same object, so that a new type is one file and one entry of ``KINDS``.

    row -> text columns + label_of(row) -> encode -> batch -> logits -> loss over the positions that count
                                                           -> outputs -> observe -> metrics
                                                           -> outputs -> pieces of an example -> answer
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_compress.numerics.losses import LossKind, distillation_loss, task_loss
from lit_compress.tasks.records import Task
from lit_compress.utils.tables import as_code, escaped
from lit_compress.utils.types import Config, Metrics, Model, Tokenizer

UNLABELLED = -1  # the hub's mark for rows of a test split whose labels are secret
KIND = "__kind__"  # column: number of the kind of text that a row is of
IGNORED = -100  # label of positions that enter no loss and no metric
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

Columns = dict[str, list[Any]]  # name -> a value per row
Batch = dict[str, Tensor]


def inputs_of(batch: Batch) -> Batch:
    """Return the columns of ``batch`` that are inputs of the model."""
    return {name: batch[name] for name in _INPUTS if name in batch}


class TaskType:
    """One type of task. This base class has the common case: text in, one answer per row, the model's ``logits``."""

    name: str  # the ``kind`` in records of tasks
    auto_class: str  # the class of transformers that makes a model with the right head
    suffix: str | tuple[str, ...]  # end of the names of such models' classes, or several
    pipeline: str  # name of the type on the hub
    library = "transformers"  # that opens exports, as the hub calls it

    # rows
    columns: tuple[str, ...] = ("text",)  # usual names of the text columns, for the user's own task
    texts = (1, 1)  # smallest and largest number of text columns
    words = False  # the text columns are lists of words
    label = "label"  # usual name of the column of labels
    stored: Any = "int64"  # name of the Arrow type of labels, [one] for lists of it, {name: one} for groups
    classes = False  # the labels are classes with names
    own_columns = False  # every class may have a column of its own, with a 0 or 1
    secret = False  # a label of -1 is none, as in the hub's test splits
    extras: tuple[str, ...] = ()  # further columns that are read if they exist; ``id`` must differ in every row
    one_text = False  # the rows of a split are one text, divided into examples; else every row is an example
    lists = False  # rows with the same first text are one list, which splits and draws keep whole
    length, max_length = 32, 128  # usual and largest length of inputs in tokens, for the user's own task
    cuts_ends = True  # inputs that are too long lose their end, as the file of a tokenizer alone can say

    # the model
    own_head = False  # its models' heads are the same for every task
    one_stack = False  # its models are no encoders with a decoder
    unused: tuple[str, ...] = ()  # starts of names of tensors that do not affect the outputs: a file may lack them
    problem: str | None = None  # ``problem_type`` of configurations, by which transformers chooses its loss
    results: tuple[str, ...] = ("logits",)  # fields of the model's output from which :meth:`logits` is computed
    per_token = False  # the results have a place for every token that is read
    over_vocabulary = False  # the classes are the tokens of a vocabulary; batches are bounded by their logits
    pools = False  # the outputs are vectors, made of the states of tokens as ``task.pooling`` says

    # losses, scores and answers
    # for logits [..., classes] and integers [...]; ``regression`` for numbers, ``relevance`` for logits [b, 1] and
    # numbers from 0 to 1, ``vectors``
    loss: LossKind = "classification"
    one_label = False  # an example has one distribution, or number
    reads_labels = False  # the outputs need the labels without a loss too: as inputs, or to see which tokens count
    scores: tuple[str, ...] = ()  # the metrics of a user's own task
    answered = True  # whether `predict` has an answer for a row
    sample: str | None = None  # arguments of a tokenizer's call, as Python; None: one text per column
    means = "{classes}"  # the meaning of the output in Markdown; {text[0]} and {label} are names of columns

    def of(self, task: Task) -> TaskType:
        """Return the type with the settings of ``task`` for the model's output, e.g. how vectors are made."""
        return self

    def of_texts(self, task: Task) -> Task:
        """Return the task for rows of which only the texts are read."""
        return task

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> Any:
        """Check the label of ``row`` and return it as it is stored; error messages begin with ``where``.

        Raises:
            UserError: the label is not usable.
        """
        return row[task.label]

    def shown(self, task: Task, label: Any) -> Any:
        """Return a checked label, as :meth:`label_of` returns it, in the form of :meth:`answer`: names of classes."""
        if not self.classes:
            return label
        return [task.labels[number] for number in label] if isinstance(label, list) else task.labels[label]

    def classes_in(self, where: str, label: Any) -> list[Any]:
        """Return the classes in a row's label, as they are written: one, or one per word, or any number.

        Errors begin with ``where``.
        """
        return [label]

    def metrics_of(self, task: Task) -> tuple[str, ...]:
        """Return the metrics of a user's own task, whose record lacks only them; the first decides which epoch is best.

        Raises:
            UserError: its columns do not go together.
        """
        return self.scores

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Tokenise some rows of a split; pairs become one sequence, whose longer text is truncated.

        Args:
            batch, rows: columns of checked rows, and their numbers.
            tokenizer: a fast tokenizer.
            task: has the names of the columns.
            max_length: largest number of tokens of an input, special ones included.

        Returns:
            ``input_ids``, ``token_type_ids`` if the tokenizer makes them, ``length`` (tokens), ``truncated`` (bool),
            ``labels`` if the rows have a label; further columns are padded like these and are part of batches.
        """
        tokens = tokenizer(*(batch[column] for column in task.text), truncation=True, max_length=max_length)
        columns = token_columns(tokens)
        if task.label in batch:
            columns["labels"] = batch[task.label]
        return columns

    def reads_otherwise(self, task: Task, tokenizer: Tokenizer) -> str | None:
        """Return a note for the user if models that were trained elsewhere may read other tokens of the same row."""
        return None

    def head(self, task: Task) -> dict[str, Any]:
        """Return the settings of the model's configuration that depend on the task."""
        names = {"id2label": dict(enumerate(task.labels)), "label2id": {name: i for i, name in enumerate(task.labels)}}
        return {} if self.own_head else {"num_labels": task.num_labels} | (names if task.labels else {})

    def predicted_tokens(self, task: Task, max_length: int) -> int:
        """Return the largest number of tokens of an example that have logits over a vocabulary; 0 without one."""
        return max_length if self.over_vocabulary else 0

    def freeze(self, net: Model) -> None:
        """Train nothing that is :attr:`unused`: DDP refuses parameters without gradients."""
        for name, parameter in net.named_parameters():
            if name.startswith(self.unused):
                parameter.requires_grad_(False)

    def adopt(self, config: Config, folder: Path, option: str) -> None:
        """Write settings from other files of the model's folder into ``config``; messages begin with ``option``."""

    def configure(self, net: Model, task: Task) -> None:
        """Set everything else that depends on the task in a model that was just loaded, e.g. how it generates text."""

    def inputs(self, net: Model, batch: Batch) -> Batch:
        """Return the inputs with which ``net`` computes the logits for ``batch``.

        Padding is the token that its own configuration names, by which the head of a decoder finds the last token.
        """
        inputs, pads = inputs_of(batch), getattr(net.config, "pad_token_id", None)
        if pads is not None and pads >= 0:
            inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pads)
        return inputs

    def run(self, net: Model, batch: Batch, logits: bool = True, **options: Any) -> Any:
        """Return the output of ``net`` for ``batch``; ``options`` are further arguments of its forward.

        Without ``logits``, a model with a head over a vocabulary, which is not wrapped, runs up to this head if its
        code is divided there.
        """
        inputs, takes = self.inputs(net, batch), signature(net.forward).parameters
        if "use_cache" in {**takes, **(signature(net.base_model.forward).parameters if "kwargs" in takes else {})}:
            options["use_cache"] = False  # keys and values of all blocks, which only writing reads
        called = net if logits or not self.over_vocabulary else net.base_model
        return called(**inputs, **options)

    def logits(self, output: Any, batch: Batch) -> Any:
        """Return the logits, [b, ..., classes] or [b, 1], in the output of :meth:`run`, for ``batch['labels']``."""
        return output.logits

    def counted(self, batch: Batch) -> Tensor | None:
        """Return which of the distributions in the logits count: bool [b, ...]; None for all of them."""
        return batch["labels"] != IGNORED if self.over_vocabulary else None

    def counts(self, batch: Batch) -> Tensor:
        """Return how much a batch counts in the means of the losses, [4]: samples, tokens of both masks, rows."""
        rows, counted = torch.tensor(len(batch["index"]), device=batch["index"].device), self.counted(batch)
        tokens = [(mask != 0).sum() for mask in self.masks(batch)]
        return torch.stack([rows if counted is None else counted.sum(), *tokens, rows]).float()

    def gives(self, output: Any, inputs: Batch) -> Batch:
        """Return the outputs of a program of the model by name, from the model's ``output`` for ``inputs``."""
        return {name: output[name] for name in self.results}

    def at_tokens(self, results: Tensor, inputs: Batch) -> Tensor:
        """Return stacked ``results`` [n, b, ...] of a model without the places of padding, which mean nothing."""
        return results[:, inputs["attention_mask"].bool()] if self.per_token else results

    def masks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return two masks [b, length], not 0 at real tokens: of the first stack, and of a decoder after it."""
        return batch["attention_mask"], batch["attention_mask"]

    def forwards(self, batch: Batch) -> list[Batch]:
        """Return the batches that the model gets one after the other in :meth:`outputs`."""
        return [batch]

    def outputs(self, net: Model, batch: Batch, tokenizer: Tokenizer) -> Tensor:
        """Return the outputs [b, ...] from which metrics and predictions are computed."""
        return self.logits(self.run(net, batch), batch).float()

    def observe(self, metrics: Metrics, outputs: Tensor, batch: Batch) -> None:
        """Update the metrics with a batch: outputs, labels and, by their names, all columns that a metric takes."""
        metrics.update(outputs, batch["labels"], **{name: batch[name] for name in batch.keys() - {"labels"}})

    def dev_loss(self, outputs: Tensor, batch: Batch) -> Tensor | None:
        """Return the mean task loss of a batch from its :meth:`outputs`; None for written texts and for vectors."""
        if self.over_vocabulary or self.loss == "vectors":
            return None
        return task_loss(outputs, batch["labels"], self.loss)

    def divergence(self, ours: Tensor, theirs: Tensor, batch: Batch) -> float:
        """Return the sum over all distributions in a batch of KL(theirs || ours) of the logits [b, ..., classes].

        For regression and vectors, half the squared difference; see
        :func:`~lit_compress.evaluation.evaluate.divergence`.
        """
        if self.loss != "classification":
            return 0.5 * float((ours.float() - theirs.float()).square().sum())
        counted = self.counted(batch)
        mean = float(distillation_loss(ours, theirs, self.loss, temperature=1.0, counted=counted))
        return mean * (theirs[..., 0].numel() if counted is None else int(counted.sum()))

    def constants(self, task: Task) -> list[Tensor]:
        """Return the outputs [1, ...] of all constant answers, e.g. of each class; [] if they make no sense."""
        return []

    def pieces(self, task: Task, outputs: Tensor, batch: Batch) -> list[tuple[int, Any]]:
        """Return for every row of a batch the number of its example's row and its part of that example's answer."""
        return list(zip(batch["index"].tolist(), outputs, strict=True))

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Any]) -> dict[str, Any]:
        """Return the fields of a prediction, besides the text columns, from all pieces of a row."""
        raise NotImplementedError

    def example(self, task: Task) -> str:
        """Return the arguments of a tokenizer's call, as Python."""
        return self.sample or ", ".join(repr(f"a {column}") for column in task.text)

    def meaning(self, task: Task) -> str:
        """Return, in Markdown, the meaning of the model's output."""
        return self.means.format(
            classes="\n".join(f"- {i}: {escaped(name)}" for i, name in enumerate(task.labels)),
            text=[escaped(name) for name in task.text], query=as_code(task.text[0]), label=escaped(task.label),
        )  # fmt: skip


def token_columns(tokens: Any) -> Columns:
    """Return the columns that all types of task have, from the output of a tokenizer."""
    columns: Columns = {name: tokens[name] for name in ("input_ids", "token_type_ids") if name in tokens}
    columns["length"] = [len(ids) for ids in tokens["input_ids"]]
    columns["truncated"] = [bool(encoding.overflowing) for encoding in tokens.encodings]
    return columns
