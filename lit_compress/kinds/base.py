"""What a kind of task has to say, between the rows of a file and the score.

Data (``label_of``, ``encode``), methods (``logits``, ``counted``, ``observe``) and what is done with a finished net
(``outputs``, ``pieces``, ``answer``) ask the same object, so that a new kind is one file and one entry of ``KINDS``.

    row -> text columns + label_of(row) -> encode -> batch -> logits -> loss over the positions that are counted
                                                           -> outputs -> observe -> metrics
                                                           -> outputs -> pieces of an example -> answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_compress.losses import Kind as Loss

if TYPE_CHECKING:
    import pyarrow as pa
    from torchmetrics import MetricCollection
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_compress.tasks import Task

IGNORED = -100  # a label of a position that enters no loss and no metric
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

Columns = dict[str, list[Any]]  # name -> a value per row


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what of ``batch`` the net is called with."""
    return {name: batch[name] for name in _INPUTS if name in batch}


class TaskKind:
    """One kind. The base has what most share: text in, one answer per row, the net's ``logits``.

    Attributes:
        name: in tasks.
        auto_class: the class of transformers that makes a net with the right head.
        suffix: how the names of such nets' classes end.
        pipeline: how the hub calls it.
        loss: how far logits [..., classes] are from integers [...], or numbers from numbers.
        words: the text columns are lists of words, not text.
        results: fields of the net's output that its logits are made of.
        extras: columns that are read if they are there; ``id`` must be different in every row.
        needs_rows: the metrics ask for the rows of the split.
        columns, label: what the columns are usually called.
        texts: how many text columns there may be, fewest and most.
        classes: the labels are classes with names.
        one_text: the rows of a split are one text, cut into examples; else every row is an example.
        length, max_length: of inputs in tokens, where the task is the user's own.
    """

    name: str
    auto_class: str
    suffix: str
    pipeline: str
    loss: Loss = "classification"
    words = False
    results: tuple[str, ...] = ("logits",)
    extras: tuple[str, ...] = ()
    needs_rows = False
    columns: tuple[str, ...] = ("text",)
    label = "label"
    texts = (1, 1)
    classes = False
    one_text = False
    length = 32
    max_length = 128

    # ------------------------------------------------------------------------------ rows and token ids

    def label_type(self) -> pa.DataType:
        """Return the Arrow type of what :meth:`label_of` returns."""
        raise NotImplementedError

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> Any:
        """Check the label of ``row`` and return it as it is stored; ``where`` begins an error message.

        Raises:
            UserError: it is not usable.
        """
        raise NotImplementedError

    def labels_in(self, label: Any) -> list[Any]:
        """Return the classes that a row's label is made of, as they are written."""
        return [label]

    def metrics(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the metrics of a user's own task; the first decides which epoch is best."""
        raise NotImplementedError

    def is_unlabelled(self, label: Any) -> bool:
        """Say whether a label marks a row whose real one is secret."""
        return False

    def encode(
        self, batch: Columns, rows: list[int], tokenizer: PreTrainedTokenizerBase, task: Task, max_length: int
    ) -> Columns:
        """Tokenise a part of a split; pairs become one sequence, truncated at the longer text.

        Args:
            batch: columns of checked rows.
            rows: their numbers.
            tokenizer: a fast one.
            task: names the columns.
            max_length: tokens of an input, special ones included.

        Returns:
            ``input_ids``, ``token_type_ids`` if the tokenizer makes them, ``length`` (tokens), ``truncated`` (bool),
            ``labels`` if the rows have a label; lists in other columns are padded like these and come with the batch.
        """
        tokens = tokenizer(*(batch[column] for column in task.text), truncation=True, max_length=max_length)
        columns = token_columns(tokens)
        if task.label in batch:
            columns["labels"] = batch[task.label]
        return columns

    # ------------------------------------------------------------------------------ the net

    def head(self, task: Task) -> dict[str, Any]:
        """Return the settings of the net's configuration that the task decides."""
        settings: dict[str, Any] = {"num_labels": task.num_labels}
        if task.labels:
            settings["id2label"] = dict(enumerate(task.labels))
            settings["label2id"] = {label: i for i, label in enumerate(task.labels)}
        return settings

    def configure(self, net: PreTrainedModel, task: Task) -> None:
        """Give a net that was just loaded what the task decides besides its shape."""

    def inputs(self, net: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what ``net`` is called with to have its logits for ``batch``."""
        return inputs_of(batch)

    def logits(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return [b, ..., classes] or [b, 1] of a net's ``output`` for ``batch``, to be compared with ``labels``."""
        return output.logits

    def counted(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return which of the distributions in the logits count: bool [b, ...]; None for all of them."""
        return None

    def masks(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return where tokens are, not 0, [b, length] each: in the first stack of blocks, and in a decoder after it."""
        return batch["attention_mask"], batch["attention_mask"]

    # ------------------------------------------------------------------------------ scores and answers

    def outputs(self, net: PreTrainedModel, batch: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Return what the metrics and the predictions are made of, [b, ...]."""
        return self.logits(net(**self.inputs(net, batch)), batch).float()

    def observe(self, metrics: MetricCollection, outputs: Tensor, batch: dict[str, Tensor]) -> None:
        """Show a batch to the metrics."""
        metrics.update(outputs, batch["labels"])

    def constants(self, task: Task) -> list[Tensor]:
        """Return the outputs [1, ...] of nets that answer every row alike; [] where that is worth nothing."""
        return []

    def pieces(self, task: Task, outputs: Tensor, batch: dict[str, Tensor]) -> list[tuple[int, Any]]:
        """Return (number of the example's row, what a batch's row says of it)."""
        return list(zip(batch["index"].tolist(), outputs, strict=True))

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Any]) -> dict[str, Any]:
        """Return the fields of a prediction, besides the text columns, from all pieces of a row."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------ the model card

    def example(self, task: Task) -> str:
        """Return the arguments of a tokenizer's call, as Python."""
        return ", ".join(f'"a {column}"' for column in task.text)

    def meaning(self, task: Task) -> str:
        """Say in Markdown what the net's output means."""
        return "\n".join(f"- {i}: {name}" for i, name in enumerate(task.labels))


def token_columns(tokens: Any) -> Columns:
    """Return the columns of every kind from what a tokenizer returned."""
    columns: Columns = {name: tokens[name] for name in ("input_ids", "token_type_ids") if name in tokens}
    columns["length"] = [len(ids) for ids in tokens["input_ids"]]
    columns["truncated"] = [bool(encoding.overflowing) for encoding in tokens.encodings]
    return columns
