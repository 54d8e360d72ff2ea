"""The settings of data: the task's record, from where its rows come, the tokenizer and how long inputs are."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_compress.data.custom import custom_task
from lit_compress.data.readers import Place
from lit_compress.data.sources import CUSTOM, located
from lit_compress.models.backbones import DEFAULT, load_config, load_tokenizer, resolve
from lit_compress.models.padding import usable_positions
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Custom, Task, get_task
from lit_compress.tasks.sentences import Pooling, read_pooling
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.hub import is_name
from lit_compress.utils.progress import note
from lit_compress.utils.types import Tokenizer

LONGEST = 512  # tokens of a sentence model that reads more; in training memory grows with them
SHORTEST = 4  # tokens; an input has at least its special tokens and a piece of text
LOGITS, LOGITS_CPU = 1 << 29, 1 << 25  # most logits over a vocabulary of a batch, on an accelerator and on a CPU


def _check_sizes(**sizes: int | None) -> None:
    """Refuse by a UserError an option of the data that is too small."""
    smallest = {"max_length": SHORTEST, "num_workers": 0, "stride": 0, "target_length": 2}
    for name, value in sizes.items():
        if value is not None and value < smallest.get(name, 1):
            raise UserError(f"data.{name}: {value} is too small; the smallest is {smallest.get(name, 1)}")


def _asked(settings: Any, **values: Any) -> Any:
    """Return ``settings`` with all values that are not None replaced."""
    return replace(settings, **{name: value for name, value in values.items() if value is not None})


def pooling_of(backbone: str, teacher: str | None = None) -> Pooling:
    """Return the pooling of a run: of the model whose vectors are learned, the teacher, or, if that does not say it,
    the backbone; each a folder or a name.

    Raises:
        UserError: the folder makes vectors in a way that no export can keep.
    """
    for name, option in ((teacher, "model.teacher"), (backbone, "model.backbone")):
        asks = name is not None and is_name(name) and name != DEFAULT  # the default backbone says nothing of pooling
        if name and (found := read_pooling(Path(resolve(name) if asks else name).expanduser(), option)):
            return found
    return Pooling()


class DataSettings(LightningDataModule):
    """Read a task's data, tokenise it once, and make batches of texts of similar length.

    Args:
        task: name of the task, e.g. sst2; custom is the user's own.
        backbone: folder or hub name whose tokenizer is used; follows model.backbone.
        path: folder with the files train and validation (and test) as .parquet, .jsonl, .json, .csv, .tsv or, plain
            text, .txt; a single file; a data set on the Hugging Face hub, OWNER/NAME[@REVISION], or the folder of a
            downloaded one; without it the task's data set on the hub. Plain text of several kinds is in a folder
            train, a file of each kind; every draw takes as many examples of each.
        revision: branch, tag or commit of the data set on the hub; without it main. A run keeps the commit.
        batch_size: training examples per device and micro-batch. Long texts and a large vocabulary make smaller
            micro-batches of the same step, of at most 34 million logits on a CPU and 537 million on a GPU.
        eval_batch_size: examples per device and batch in validation, test and predict; for language models with the
            same limit.
        max_length: longest input in tokens, longer ones are truncated; without it the task's, or the
            backbone's limit if that is shorter.
        train_examples: number of training examples to draw (by seed); without it all.
        validation_examples: number of examples to draw of each validation split, the same for every seed; without it
            all. A test split is never reduced, and predict uses all rows unless it is given this option itself.
        hold_out: number of training rows (drawn by seed) that are not trained on. They take the place of the dev set
            while a stage trains, so that they choose its best epoch; the dev set is measured when it is finished.
        num_workers: processes that load batches ahead; does not change results.
        seed: decides the order of the batches, and which training examples are drawn.
        split_seed: decides how a single file is split; other than the seed, so that all seeds share one dev set.
        custom: type, columns and labels of task custom.
        encoding: of text files, e.g. cp1252 or utf-16; without it UTF-8.
        separator: sign between the fields of text files; without it a comma, in .tsv a tab, or what the header has.
        stride: number of tokens that neighbouring windows of a context share (span_qa); without it 128.
        null_threshold: by how much the score of "no answer" must exceed the best span's score to be given (span_qa);
            without it the task's; for custom every question has an answer.
        target_length: longest generated text, in tokens (summarization); without it the model's own, or 128. Reference
            texts are cut to it in training, or to 128.
        num_beams: number of beams in beam search (summarization); without it the model's own, or 8.
        length_penalty: the log-likelihood of a generated text is divided by its length to this power (summarization);
            without it 1.
        pooling: how a text's vector is made of the states of its tokens (embedding): mean, cls (the first one) or
            lasttoken; without it the pooling of the teacher's or the backbone's folder of sentence-transformers, else
            mean.
        normalize: whether predictions and exports divide vectors by their length (embedding); without it the same.
        teacher: folder or name of the model whose vectors are learned (embedding); follows model.teacher.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = DEFAULT,
        path: str | None = None,
        revision: str | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        max_length: int | None = None,
        train_examples: int | None = None,
        validation_examples: int | None = None,
        hold_out: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
        split_seed: int = 42,
        custom: Custom = Custom(),
        encoding: str | None = None,
        separator: str | None = None,
        stride: int | None = None,
        null_threshold: float | None = None,
        target_length: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        teacher: str | None = None,
    ) -> None:
        super().__init__()
        if path is not None and (repository := located(task, path, revision, custom.configuration)) is not None:
            path, revision = str(repository.folder), None
        self.place = Place(path, encoding, separator, split_seed, revision=revision)
        self.record: Task = custom_task(custom, self.place) if task == CUSTOM else get_task(task)
        spans = _asked(self.record.spans, stride=stride, null_threshold=null_threshold)
        options = (("target_length", target_length), ("num_beams", num_beams), ("length_penalty", length_penalty))
        asked: dict[str, Any] = {name: value for name, value in options if value is not None}
        writing = replace(self.record.writing, **asked, asked=tuple(asked))
        self.record = replace(self.record, spans=spans, writing=writing, split_words=custom.split_words)
        self._asked_pooling = {"tokens": pooling, "normalize": normalize}
        if task_type(self.record).pools:
            self._pool_as(pooling_of(backbone, teacher))
        _check_sizes(
            batch_size=batch_size, eval_batch_size=eval_batch_size, max_length=max_length, stride=stride,
            train_examples=train_examples, validation_examples=validation_examples, hold_out=hold_out,
            num_workers=num_workers, target_length=target_length, num_beams=num_beams,
        )  # fmt: skip
        self.task, self.backbone = task, backbone
        self.teacher: str | None = teacher or backbone  # None: texts that want its vectors get them by :meth:`label_by`
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.train_examples, self.validation_examples = train_examples, validation_examples
        self.hold_out, self.num_workers = hold_out, num_workers
        self.seed = seed
        self.reads_labels = True  # False: the training rows may have none, as only their texts are read
        self._asked_length = max_length
        self.choosing = False  # True: scores choose a model, also without a Trainer, and so are of held-out rows
        self.predicted = ""  # name of the split for predict
        # (name, must have labels) -> split; None: a second validation split that does not exist
        self._splits: dict[tuple[str, bool], Any] = {}
        # name -> hash of all rows of a split that was read, if some are held out; the same for every seed
        self.contents: dict[str, str] = {}
        self.accumulate = self.devices = 1  # micro-batches of an optimizer step, and processes without a Trainer

    def read_as(self, folder: str) -> None:
        """Read with the tokenizer of the model in ``folder``, and make vectors as it does, if its files say how."""
        self.backbone = folder
        if task_type(self.record).pools:
            self._pool_as(read_pooling(Path(folder), "data"))

    def _pool_as(self, pooling: Pooling | None) -> None:
        if pooling is not None:
            self.record = replace(self.record, pooling=_asked(pooling, **self._asked_pooling))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The backbone's tokenizer."""
        tokenizer = load_tokenizer(self.backbone, self.record)
        if line := task_type(self.record).reads_otherwise(self.record, tokenizer):
            note(line)
        return tokenizer

    @functools.cached_property
    def limit(self) -> int:
        """Number of tokens that the backbone can read, or its tokenizer gives; 1e30 if nothing limits it."""
        positions = usable_positions(load_config(self.backbone, self.record))
        own = max(self.tokenizer.model_max_length, self.record.pooling.max_length or 0)  # sentence models replace it
        return min(own, positions or own)

    @property
    def max_length(self) -> int:
        """Longest input in tokens; longer ones are truncated."""
        usual = self.record.max_length if self.record.pooling.max_length is None else LONGEST
        return min(self.deployed_length, self._asked_length or usual)

    @functools.cached_property
    def deployed_length(self) -> int:
        """Longest input of the export in tokens; a sentence model keeps its own limit unless another was asked for."""
        limit = self.limit
        if self._asked_length is None:
            return min(self.record.pooling.max_length or self.record.max_length, limit)
        if self._asked_length > limit:
            raise UserError(
                f"data.max_length: {self._asked_length} is more than '{self.backbone}' reads; the largest is {limit}"
            )
        return self._asked_length

    @property
    def eval_rows(self) -> int:
        """Examples per device and batch without training: ``eval_batch_size``, or :meth:`fewer` if logits are read."""
        return self.fewer(self.eval_batch_size) if task_type(self.record).per_token else self.eval_batch_size

    def fewer(self, examples: int) -> int:
        """Return the number of ``examples``, or as many as have :data:`LOGITS` over a vocabulary; at least 1.

        It depends on nothing but the options, the tokenizer and the kind of device, so all ranks have the same.
        """
        logits = task_type(self.record).predicted_tokens(self.record, self.max_length) * len(self.tokenizer)
        if not logits:
            return examples
        place = current_device() if self.trainer is None else self.trainer.strategy.root_device
        return max(1, min(examples, (LOGITS_CPU if place.type == "cpu" else LOGITS) // logits))
